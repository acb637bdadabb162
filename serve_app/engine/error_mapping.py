"""Maps failures of vLLM's application to the request or to the engine."""

import json
import logging

from serve_app.api.errors import RequestError
from serve_app.relay.frame import pack_error, unpack

logger = logging.getLogger("ray.serve")

FAILED = {500, 501}


def blame_request(message: bytes) -> bytes:
    """Return the answer of vLLM's application to a request that has got no token of an engine that lives.

    Only the request can have made it fail: the application fails on some values before it has checked them
    and on features that the model doesn't have, the engine on grammars that it can't compile. Such a failure
    becomes a 400.

    Args:
        message: The first relay message of the answer.
    """
    piece = unpack(message)
    if piece.head is None or piece.head.status not in FAILED or piece.usage is None:
        return message
    # The application's own message is not logged: it may quote the request.
    logger.warning("vLLM failed on a request before its first token; answered 400")
    try:
        reason = str(json.loads(piece.body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = "it gives no reason"
    text = f"vLLM can't process this request: {reason}"
    return pack_error(RequestError(400, "invalid_request_error", text))
