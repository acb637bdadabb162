"""The work of `/generate`: a list of prompts, each admitted and completed by itself."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serve_app.api.errors import RequestError
from serve_app.api.protocol import Detail, GenerateRequest, GenerateResponse, Usage
from serve_app.api.scheduling import Scheduling
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.batch_call import BatchCall
from serve_app.ledger.calls import Call
from serve_app.relay.usage import RequestUsage

if TYPE_CHECKING:
    # vLLM takes seconds and a gigabyte.
    from serve_app.engine.vllm.completions import Completions
    from serve_app.engine.vllm.prompts import Prompts


class Generation:
    """Completes lists of prompts.

    Args:
        prompts: Turns texts and chats into prompts.
        completions: Completes each of them.
    """

    def __init__(self, prompts: "Prompts", completions: "Completions") -> None:
        self._prompts = prompts
        self._completions = completions

    async def run(
        self,
        request: GenerateRequest,
        scheduling: Scheduling,
        usage: RequestUsage,
        account: Call,
        adapter: str = "",
        max_tokens: int | None = None,
        size: int = 0,
    ) -> GenerateResponse:
        """Complete the prompts of a request.

        Args:
            request: The request.
            scheduling: Its tier, tenant and deadline.
            usage: Gets the tokens.
            account: Gets the work.
            adapter: Id of its adapter; empty: none.
            max_tokens: Most tokens of each completion; None: the request's own.
            size: Bytes of its body.

        Raises:
            RequestError: It can't be served, and `partial` is not set.
        """
        deadline = scheduling.deadline(time.monotonic())
        asked = AdmissionRequest(scheduling, deadline, max_tokens=max_tokens, size=size, adapter=adapter)
        set_current(asked, AdmissionResult(usage=usage))
        sampling = self._completions.sampling(request)
        prompts: Sequence[list[int] | RequestError]
        if request.messages is None:
            prompts = await self._prompts.tokenize(request.prompts or [])
        else:
            prompts = await self._prompts.render(request.messages)
        call = BatchCall("prompts" if request.messages is None else "messages", partial=request.partial)
        results: list[str | None] = [None] * len(prompts)
        details: list[Detail | None] = [None] * len(prompts)

        async def complete(index: int, token_ids: list[int] | RequestError) -> None:
            try:
                if isinstance(token_ids, RequestError):
                    raise token_ids
                own = asked._replace(wait=call.wait(index))
                set_current(own, AdmissionResult(usage=usage, call=account))
                done = await self._completions.complete(token_ids, sampling, adapter)
            except RequestError as error:
                call.fail(index, error)
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
        if call.errors is not None:
            response.errors = call.errors
        return response


def _usage(details: list[Detail | None]) -> Usage:
    prompt = sum(detail.prompt_tokens for detail in details if detail)
    completion = sum(detail.completion_tokens for detail in details if detail)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
