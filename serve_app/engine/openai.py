"""The answer to a job through vLLM's OpenAI application."""

import json

from starlette.types import ASGIApp

from serve_app.api.errors import RequestError, vllm_error
from serve_app.engine.answer import Answer, StreamTokens
from serve_app.engine.job import Job, set_current
from serve_app.wire.frame import Head
from serve_app.wire.request import RelayRequest

DETOKENIZE = "/detokenize"

OTHER_COMMAS = 100
"""Commas that a request of `/detokenize` may have outside its list."""

OWN = {b"retry-after", b"x-should-retry"}
"""Headers that errors of the Engine have, which are in shape, and none of vLLM's."""

RESUMABLE = {"/v1/chat/completions", "/v1/completions"}
"""Routes whose streams may go on in another replica when this one dies."""


def too_many_ids(request: RelayRequest, most: int) -> RequestError | None:
    """Return why a request has too many token ids: to parse them would hold all other jobs up.

    Args:
        request: The request.
        most: Most token ids.
    """
    if request.path != DETOKENIZE:
        return None
    # Other fields have a few commas too.
    if request.body.count(b",") <= most + OTHER_COMMAS:
        return None
    message = f"tokens: at most {most} token ids are taken here (max_tokenize_tokens)"
    return RequestError(400, "invalid_request_error", message, param="tokens")


async def run(app: ASGIApp, job: Job, answer: Answer) -> None:
    """Have vLLM's application answer a job that the door has admitted.

    Args:
        app: The application.
        job: The job.
        answer: Gets the answer.
    """
    if job.request.path in RESUMABLE:
        job.stream = answer.tokens = StreamTokens()
    # A job that was refused has its own reason; what the application makes of it isn't asked.
    answer.explain = reason
    set_current(job)
    await answer.run(app)


def reason(head: Head, body: bytes) -> RequestError | None:
    """Return the error in a whole answer of vLLM's application; None: it has none, or is in shape.

    vLLM has types of its own for most errors, and OpenAI's shape on Anthropic's routes too.
    """
    if head.status < 400 or any(name in OWN for name, _ in head.headers):
        return None
    reason, param = "vLLM gives no reason", None
    try:
        error = json.loads(body)["error"]
        reason, param = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError):
        pass
    return vllm_error(head.status, reason, param)
