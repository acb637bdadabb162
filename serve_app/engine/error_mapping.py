"""Whose fault it is when vLLM's application says that it failed."""

import json
import logging

from serve_app.api.errors import RequestError
from serve_app.relay.asgi import Head, pack_error

logger = logging.getLogger("ray.serve")

FAILED = {500, 501}


def of_the_request(message: bytes) -> bytes:
    """Return an answer of vLLM's application to a request that the engine has not seen.

    With an engine that lives, nothing but the request itself can have made the application fail: it trips
    over some values before it has checked them, and over features that the model doesn't have. That is a 400.

    Args:
        message: The first message of the answer.
    """
    head, body, whole = Head.unpack(message)
    if head.status not in FAILED or not whole:
        return message
    # Not what it said: that may quote the request.
    logger.warning("vLLM's application failed on a request before its engine had it; answered 400")
    try:
        reason = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = "it gives no reason"
    text = f"vLLM can't process this request: {reason}"
    return pack_error(RequestError(400, "invalid_request_error", text))
