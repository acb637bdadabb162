"""The answer to a job through vLLM's OpenAI application."""

import json
import logging
import re
from contextlib import suppress
from functools import partial

from starlette.types import ASGIApp

from serve_app.api.errors import CONTEXT, FAULT, EngineAwayError, RequestError, vllm_error
from serve_app.api.facts import PROMPT_LISTS
from serve_app.api.headers import request_id
from serve_app.engine.answer import Answer, StreamTokens
from serve_app.engine.job import Job, set_current
from serve_app.wire.frame import Head
from serve_app.wire.request import RelayRequest

logger = logging.getLogger("ray.serve")

DETOKENIZE = "/detokenize"

OTHER_COMMAS = 100
"""Commas that a request of `/detokenize` may have outside its list."""

OF_REQUESTS = (ValueError, TypeError, OverflowError, NotImplementedError)
"""Exceptions without a class of vLLM's by which it refuses a request, or a prompt of it, before it runs."""

EMPTY = "prompt cannot be empty"
"""Words of vLLM's error about a text without tokens; it doesn't say which text of a list."""

FILLED = "(parameter=max_tokens, value=0)"
"""Words of vLLM's error about a length of 0."""

NO_FILE = "Cannot load local files"
"""Words of vLLM's error about media whose URL names a file."""

OTHER_REQUEST = re.compile(r"\d+ validation errors? for \w+\n(?:.*\.)?(.*)\n  (.*?) \[type=")
"""Words of pydantic where vLLM has made a request from another request: the field, and the reason."""

RESUMABLE = {"/v1/chat/completions", "/v1/completions"}
"""Routes whose streams may go on in another replica when this one dies."""


def too_many_ids(request: RelayRequest, most: int) -> RequestError | None:
    """Return why a request has too many token ids: to parse them would hold all other jobs up.

    Args:
        request: The request.
        most: Maximum token ids.
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
    answer.explain = partial(explained, job)
    set_current(job)
    try:
        await answer.run(app)
    except RuntimeError as error:
        # Starlette raises it where a stream fails behind its head.
        if job.failure is None and not job.usage.ran and isinstance(error.__cause__, OF_REQUESTS):
            job.failure = refusal(job, 400, str(error.__cause__))
        raise


def explained(job: Job, head: Head, body: bytes) -> RequestError:
    """Return the error in a whole answer of vLLM's application, or in an event of its stream.

    vLLM has types of its own for most errors, OpenAI's shape on Anthropic's routes too, and a 400 for most
    exceptions.

    Args:
        job: The job.
        head: The head of the answer. The status of an event is in its error.
        body: The answer, or the event.
    """
    reason, param, code = "vLLM gives no reason", None, None
    try:
        error = json.loads(body[body.index(b"{") :])["error"]
        reason, param, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, LookupError, TypeError):
        pass
    status = head.status if head.status >= 400 else code if isinstance(code, int) else 500
    if job.usage.ran and status < 500:
        # An answer that can't be made of the engine's output is no mistake of the request.
        message = "The service failed on this request; its log has the reason."
        failed = RequestError(500, "internal_error", message)
    else:
        failed = refusal(job, status, reason, param)
    if failed.status == 500:
        # Further lines may quote the answer.
        first = reason.partition("\n")[0]
        fault = RuntimeError(f"vLLM's application answered {status}: {first}")
        logger.error(FAULT, request_id(job.request.headers), job.request.path, exc_info=fault)
    return failed


def refusal(job: Job, status: int, reason: str, param: str | None = None) -> RequestError:
    """Return an error of vLLM in the words of this service.

    Args:
        job: The job.
        status: The HTTP status.
        reason: vLLM's reason.
        param: The field that vLLM names.
    """
    if status == 503:
        return EngineAwayError(reason)
    if FILLED in reason and job.facts.output != 1:
        # The request states no length, and vLLM has computed the rest of the context.
        reason = f"The prompt fills this model's {CONTEXT}, and no token is left for an answer; shorten it"
    elif EMPTY in reason and (empty := _empty_text(job.request.body)):
        reason, param = f"{empty}: the text is empty", empty
    elif NO_FILE in reason:
        status, param = 400, job.facts.media or None
        reason = "A file of the server is not read; send a `data:` URL, or the URL of an allowed host"
    elif other := OTHER_REQUEST.match(reason):
        reason = f"{other[1]}: {other[2]}"
    # vLLM can't do what the request asks for (501).
    return vllm_error(400 if status == 501 else status, reason.partition(" (parameter=")[0], param)


def _empty_text(body: bytes) -> str | None:
    """Return the path of the first empty text in the lists of a body; None: there is none."""
    with suppress(ValueError):
        fields = json.loads(body)
        for name in PROMPT_LISTS:
            if isinstance(items := fields.get(name), list):
                for index, item in enumerate(items):
                    if item in ("", []):
                        return f"{name}[{index}]"
    return None
