"""The Engine deployment: a model and its batcher, behind a handle."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from serve_app import admission, fault
from serve_app.admission import Admission
from serve_app.errors import RequestError
from serve_app.lifeline import tie_children
from serve_app.precedence import let_others_finish
from serve_app.protocol import (
    JSON,
    Detail,
    GenerateRequest,
    GenerateResponse,
    PromptError,
    Usage,
    parse_generate,
)
from serve_app.relay import RelayRequest, run_app
from serve_app.replica import DRAIN_S, answer, replica_stats
from serve_app.settings import LLMSettings
from serve_app.terms import Terms

PARTIAL = {400, 408}
"""Errors of one prompt, which leave the others of a `partial` call as they are."""


class Engine:
    """One copy of a model: a vLLM engine and its batcher, built once, in the constructor.

    Args:
        settings: The model.
        max_prompts: Most prompts that one call may carry.
    """

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self, settings: LLMSettings, max_prompts: int
    ) -> None:
        # vLLM is imported where a model is held, and nowhere else: it takes seconds and a gigabyte.
        from serve_app.vllm_engine import VLLMEngine

        tie_children()
        self._max_prompts = max_prompts
        self._engine = VLLMEngine(settings)
        self._app = await self._engine.start()
        # The engine's own processes run by now, and don't.
        let_others_finish()

    async def generate(self, request: GenerateRequest | JSON) -> JSON:
        """Complete a list of prompts.

        Args:
            request: A `GenerateRequest`, or an object with its fields.

        Returns:
            The fields of a `GenerateResponse`: what `POST /generate` answers.

        Raises:
            RequestError: The request is wrong, or can't be served now.
        """
        if not isinstance(request, GenerateRequest):
            request = parse_generate(request, max_prompts=self._max_prompts)
        response = await self._generate(request, request.terms())
        return response.model_dump(exclude_unset=True)

    async def relay(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        """Answer an HTTP request, as relay messages."""
        if request.path == "/generate":
            yield await answer(self._answer_generate(request))
            return
        verdict = Admission(request.terms, request.terms.deadline(time.monotonic()))
        admission.current.set(verdict)
        messages = run_app(self._app, request, refusal=lambda: verdict.refusal)
        answered = False
        async with aclosing(messages):
            async for message in messages:
                if not answered and self._is_unseen(verdict):
                    message = fault.of_the_request(message)
                answered = True
                yield message

    def _is_unseen(self, request: Admission) -> bool:
        """Return whether a request was answered without the engine, though that is there."""
        return not request.admitted and request.refusal is None and not self._engine.dead

    async def stats(self) -> JSON:
        """Return the batcher's statistics and the engine's limits."""
        return replica_stats(self._engine.batcher.stats, max_model_len=self._engine.max_model_len)

    async def check_health(self) -> None:
        """Raise if the engine has died, so that Serve replaces this replica."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            await engine.stop(DRAIN_S)

    async def _answer_generate(self, relayed: RelayRequest) -> bytes:
        request = parse_generate(relayed.body, max_prompts=self._max_prompts)
        response = await self._generate(request, relayed.terms)
        return response.model_dump_json(exclude_unset=True).encode()

    async def _generate(self, request: GenerateRequest, terms: Terms) -> GenerateResponse:
        deadline = terms.deadline(time.monotonic())
        sampling = self._engine.sampling(request)
        field = "prompts" if request.messages is None else "messages"
        prompts: Sequence[list[int] | RequestError]
        if request.messages is None:
            prompts = await self._engine.tokenize(request.prompts or [])
        else:
            prompts = await self._engine.render(request.messages)
        results: list[str | None] = [None] * len(prompts)
        details: list[Detail | None] = [None] * len(prompts)
        errors: list[PromptError] = []

        async def complete(index: int, token_ids: list[int] | RequestError) -> None:
            # The first prompt is refused when the queue is full, and its call with it; once it has a
            # place, the others wait for theirs. So a list longer than the queue can still be served.
            admission.current.set(Admission(terms, deadline, wait=index > 0))
            try:
                if isinstance(token_ids, RequestError):
                    raise token_ids
                done = await self._engine.complete(token_ids, sampling)
            except RequestError as error:
                if not request.partial or error.status not in PARTIAL:
                    raise error.at(f"{field}[{index}]") from None
                errors.append(PromptError(index=index, type=error.type, message=error.message))
                return
            results[index] = done.text
            details[index] = Detail(
                finish_reason=done.finish_reason,
                prompt_tokens=len(token_ids),
                completion_tokens=done.tokens,
            )

        tasks = [asyncio.ensure_future(complete(i, ids)) for i, ids in enumerate(prompts)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        response = GenerateResponse(results=results, task_id=request.task_id, usage=_usage(details))
        if request.details:
            response.details = details
        if request.partial:
            response.errors = sorted(errors, key=lambda error: error.index)
        return response


def _usage(details: list[Detail | None]) -> Usage:
    prompt = sum(detail.prompt_tokens for detail in details if detail)
    completion = sum(detail.completion_tokens for detail in details if detail)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
