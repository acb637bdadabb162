"""Answers of vLLM's own OpenAI application as relay messages."""

import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from serve_app.api.errors import ANTHROPIC, FAULT, RequestError, engine_failed, internal_error
from serve_app.api.headers import request_id
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.arrivals import Arrivals
from serve_app.engine.grammar_check import GrammarCheck
from serve_app.engine.grammars import Grammar, grammars_of
from serve_app.ledger.calls import Call
from serve_app.relay.asgi import run_app
from serve_app.relay.events import error_event
from serve_app.relay.frame import KEEP_ALIVE, LOST, pack, pack_error, unpack
from serve_app.relay.keepalive import with_keepalive
from serve_app.relay.request import RelayRequest
from serve_app.relay.resume import StreamTokens, to_ids
from serve_app.relay.usage import RequestUsage

if TYPE_CHECKING:
    # vLLM takes seconds and a gigabyte.
    from serve_app.engine.vllm.engine import VLLMEngine

logger = logging.getLogger("ray.serve")

DETOKENIZE = "/detokenize"

OTHER_COMMAS = 100
"""Commas that a request of `/detokenize` may have outside its list."""

RESUMABLE = {"/v1/chat/completions", "/v1/completions"}
"""Routes whose streams may go on in another replica when this one dies."""


class OpenAIAnswers:
    """Answers requests through vLLM's application.

    Args:
        app: The application.
        engine: Its engine.
        grammars: Checks the grammars of requests.
        ready_at: Time at which the engine was ready, on the monotonic clock; before it nothing could run.
    """

    def __init__(self, app: ASGIApp, engine: "VLLMEngine", grammars: GrammarCheck, ready_at: float) -> None:
        self._app = app
        self._engine = engine
        self._grammars = grammars
        self._ready_at = ready_at
        self._arrivals = Arrivals()

    async def answer(
        self, request: RelayRequest, began: float, usage: RequestUsage, call: Call
    ) -> AsyncGenerator[bytes, None]:
        """Yield the relay messages of an answer.

        Args:
            request: The request.
            began: When it came, on the monotonic clock.
            usage: Gets the tokens.
            call: Gets the work.
        """
        try:
            self._check_tokens(request)
            grammars = grammars_of(request.body)
        except RequestError as error:
            yield pack_error(error, request.path)
            return
        if grammars:
            async with aclosing(with_keepalive(self._check_grammars(grammars, request.path))) as checking:
                async for message in checking:
                    if message:
                        yield message
            if message:
                return
        scheduling = request.scheduling_now()
        result = AdmissionResult(usage=usage, call=call)
        # The wait for a replica to start tells nothing of what runs in it.
        arrived_at = max(self._ready_at, time.monotonic() - request.age_s)
        if request.path in RESUMABLE:
            result.stream = StreamTokens()
        set_current(
            AdmissionRequest(
                scheduling,
                scheduling.deadline(began),
                wait=request.resumes,
                token_ids=tuple(to_ids(request.token_ids)),
                max_tokens=request.max_tokens,
                size=len(request.body),
                adapter=request.adapter,
                # A stream that goes on had its first token before.
                arrived_at=None if request.resumes else arrived_at,
                grammars=tuple(grammars),
            ),
            result,
        )

        def refusal() -> RequestError | None:
            return result.refusal or (engine_failed() if self._engine.died else result.failure)

        def lost() -> bool:
            return self._engine.died

        def started() -> bool:
            return result.admitted or refusal() is not None

        messages = run_app(
            self._app,
            request,
            usage=usage,
            refusal=refusal,
            stream=result.stream,
            lost=lost,
            started=started,
        )

        answered = streams = False
        arrival = result.arrival = await self._arrivals.enter(scheduling.priority)
        try:
            async with aclosing(messages):
                async for message in messages:
                    if not answered and message != KEEP_ALIVE:
                        answered = True
                        if self._engine.died and not result.refusal:
                            yield LOST
                            return
                        message = _in_shape(message, request.path)
                        head = unpack(message).head
                        streams = head is not None and head.is_event_stream
                    yield message
        except Exception as error:
            # Logged with its stack below.
            result.fault = result.fault or error
            if self._engine.died or (answered and not streams):
                # The connection breaks: the client can't take what it has for the whole.
                raise
            failure = result.failure or internal_error(error)
            if answered:
                yield pack(body=error_event(failure, request.path), usage=usage)
            else:
                yield pack_error(failure, request.path, usage)
        finally:
            arrival.end()
            if result.fault is not None and not self._engine.died:
                id = request_id(request.headers)
                logger.error(FAULT, id, request.path, exc_info=result.fault)
            # Its frames hold what the request holds, a slot of the batcher among it.
            result.fault = None

    def _check_tokens(self, request: RelayRequest) -> None:
        """Refuse a list of token ids that is too long before it is parsed, which holds all others up."""
        if request.path != DETOKENIZE:
            return
        most = self._engine.max_tokenize_tokens
        # Other fields have a few commas too.
        if request.body.count(b",") > most + OTHER_COMMAS:
            message = f"tokens: at most {most} token ids are taken here (max_tokenize_tokens)"
            raise RequestError(400, "invalid_request_error", message, param="tokens")

    async def _check_grammars(self, grammars: list[Grammar], path: str) -> bytes:
        """Return the answer to a request with a grammar that is refused; empty: there is none."""
        try:
            await self._grammars.check(grammars)
        except RequestError as error:
            return pack_error(error, path)
        return b""


def _in_shape(message: bytes, path: str) -> bytes:
    """Return the first message of an answer, an error of Anthropic's routes in their shape.

    vLLM gives OpenAI's to those that it finds while it validates a body, and types of its own to the others.
    """
    if not path.startswith(ANTHROPIC):
        return message
    head, body, _, usage, _ = unpack(message)
    if head is None or head.status < 400 or usage is None:
        return message
    try:
        error = json.loads(body)["error"]
        reason = str(error["message"])
    except (ValueError, LookupError, TypeError):
        reason = "vLLM gives no reason"
    return pack_error(RequestError(head.status, "invalid_request_error", reason), path, usage)
