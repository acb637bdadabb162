"""The answer to a job through vLLM's OpenAI application, as relay messages."""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from serve_app.api.errors import FAULT, RequestError, engine_failed, internal_error, vllm_error
from serve_app.api.headers import request_id
from serve_app.engine.job import Job, set_current
from serve_app.relay.asgi import run_app
from serve_app.relay.events import error_event
from serve_app.relay.frame import KEEP_ALIVE, LOST, pack, pack_error, unpack
from serve_app.relay.resume import StreamTokens

if TYPE_CHECKING:
    # vLLM takes seconds and a gigabyte.
    from serve_app.engine.vllm.engine import VLLMEngine

logger = logging.getLogger("ray.serve")

DETOKENIZE = "/detokenize"

OTHER_COMMAS = 100
"""Commas that a request of `/detokenize` may have outside its list."""

OWN = {b"retry-after", b"x-should-retry"}
"""Headers that errors of the Engine have, which are in shape, and none of vLLM's."""

RESUMABLE = {"/v1/chat/completions", "/v1/completions"}
"""Routes whose streams may go on in another replica when this one dies."""


class OpenAI:
    """Answers jobs through vLLM's application.

    Args:
        app: The application.
        engine: Its engine.
    """

    def __init__(self, app: ASGIApp, engine: "VLLMEngine") -> None:
        self._app = app
        self._engine = engine

    def refusal(self, job: Job) -> RequestError | None:
        """Return why a job has too many token ids: to parse them would hold all other jobs up."""
        if job.request.path != DETOKENIZE:
            return None
        most = self._engine.max_tokenize_tokens
        # Other fields have a few commas too.
        if job.request.body.count(b",") <= most + OTHER_COMMAS:
            return None
        message = f"tokens: at most {most} token ids are taken here (max_tokenize_tokens)"
        return RequestError(400, "invalid_request_error", message, param="tokens")

    async def answer(self, job: Job) -> AsyncGenerator[bytes, None]:
        """Yield the relay messages of the answer to a job that the door has admitted."""
        request, usage = job.request, job.usage
        if request.path in RESUMABLE:
            job.stream = StreamTokens()
        set_current(job)

        def refusal() -> RequestError | None:
            return engine_failed() if self._engine.died else job.failure

        messages = run_app(
            self._app,
            request,
            usage=usage,
            refusal=refusal,
            stream=job.stream,
            lost=lambda: self._engine.died,
        )
        answered = streams = False
        try:
            async with aclosing(messages):
                async for message in messages:
                    if not answered and message != KEEP_ALIVE:
                        answered = True
                        if self._engine.died:
                            yield LOST
                            return
                        if job.failure is None:
                            message = _in_shape(message, request.path)
                        head = unpack(message).head
                        streams = head is not None and head.is_event_stream
                        if head is not None and head.status >= 500:
                            usage.outcome = "failed"
                    yield message
        except Exception as error:
            # Logged with its stack below.
            job.fault = job.fault or error
            if self._engine.died or (answered and not streams):
                # The connection breaks: the client can't take what it has for the whole.
                raise
            failure = job.failure or internal_error(error)
            usage.outcome = "failed"
            if answered:
                yield pack(body=error_event(failure, request.path), usage=usage)
            else:
                yield pack_error(failure, request.path, usage)
        finally:
            if job.fault is not None and not self._engine.died:
                id = request_id(request.headers)
                logger.error(FAULT, id, request.path, exc_info=job.fault)
            # Its frames hold what the request holds, a slot of the batcher among it.
            job.fault = None


def _in_shape(message: bytes, path: str) -> bytes:
    """Return the first message of an answer of vLLM's application; an error in the shape of its route.

    vLLM has types of its own for most errors, and OpenAI's shape on Anthropic's routes too.
    """
    head, body, _, usage, _ = unpack(message)
    if head is None or head.status < 400 or usage is None or any(name in OWN for name, _ in head.headers):
        return message
    reason, param = "vLLM gives no reason", None
    try:
        error = json.loads(body)["error"]
        reason, param = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError):
        pass
    return pack_error(vllm_error(head.status, reason, param), path, usage)
