"""Maps failures of vLLM's application to the request or to the engine."""

import json
import logging

from pydantic import ValidationError

from serve_app.api.errors import RequestError
from serve_app.relay.frame import pack_error, unpack

logger = logging.getLogger("ray.serve")

FAILED = {500, 501}


def application_error(error: Exception) -> RequestError:
    """Return an exception of vLLM's application, which gave no answer, as an error.

    Its reason is told where it is about a field: any other text may be about the server.
    """
    cause = error.__cause__
    reason = type(cause or error).__name__
    if isinstance(cause, ValidationError):
        first = cause.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return RequestError(500, "internal_error", reason)


def blame_request(message: bytes) -> bytes:
    """Return the answer of vLLM's application, where a failure can only be due to the request.

    That is a request that has got no token of an engine that lives: the application fails on some values
    before it has checked them and on features that the model doesn't have. And one with a grammar, which the
    engine may be unable to compile, or to follow. The failure becomes a 400.

    Args:
        message: The first relay message of the answer.
    """
    piece = unpack(message)
    if piece.head is None or piece.head.status not in FAILED or piece.usage is None:
        return message
    # The application's own message is not logged: it may quote the request.
    logger.warning("vLLM failed on a request by its own fault; answered 400")
    try:
        reason = str(json.loads(piece.body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = "it gives no reason"
    text = f"vLLM can't process this request: {reason}"
    return pack_error(RequestError(400, "invalid_request_error", text))
