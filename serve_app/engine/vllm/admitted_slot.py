"""The slot of the batcher that a request of vLLM runs in.

The imports are those of vLLM 0.32.
"""

import asyncio
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from batcher import BatcherError, ContinuousBatcher, Slot
from serve_app.engine.admission import current, refusal_of
from serve_app.engine.vllm.refusal import RefusedError
from serve_app.engine.vllm.stats import slot_usage
from serve_app.relay.usage import Outcome, Usage


class AdmittedSlot:
    """A slot of the batcher for a request of vLLM; it fills in the request's `AdmissionResult`.

    Attributes:
        last: The last output of vLLM.
    """

    __slots__ = ("_length", "_result", "_slot", "_usage", "last")

    def __init__(
        self, batcher: ContinuousBatcher, prompt_tokens: int, max_tokens: int, length: int, n: int = 1
    ) -> None:
        self._length = length
        self._usage: Usage
        self.last: Any = None
        request, self._result = current()
        # The first slot of a request is refused when the queue is full; once it has one, the others wait, and
        # its deadline is met: a list may be longer than the queue.
        wait = request.wait or self._result.asked > 0
        deadline = None if self._result.admitted else request.deadline
        self._result.ask()
        share = request.share
        batcher.weigh(share, request.scheduling.weight)
        self._slot = batcher.slot(
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            priority=request.scheduling.priority,
            tenant=share,
            deadline=deadline,
            wait=wait,
            records=n,
            arrived_at=request.arrived_at,
        )

    async def __aenter__(self) -> Slot:
        try:
            slot = await self._slot.__aenter__()
        except BatcherError as error:
            self._result.refusal = refusal_of(error)
            raise RefusedError(self._result.refusal) from None
        self._result.admitted = True
        try:
            self._usage = self._result.usage.begin(slot, self._length)
        except BaseException as error:
            await slot.__aexit__(type(error), error, None)
            raise
        # vLLM adds its sequences in this task, before it does anything else.
        slot_usage.set(self._usage)
        return slot

    async def __aexit__(self, *exc: Any) -> None:
        # Its sequences have ended before: their generator is closed first.
        self._usage.end(self._outcome(exc[0]))
        await self._slot.__aexit__(*exc)

    def _outcome(self, error: type[BaseException] | None) -> Outcome:
        # A reader may leave the last output without waiting for the end.
        if error is None or (self.last is not None and self.last.finished):
            return "ok"
        if issubclass(error, (asyncio.CancelledError, GeneratorExit)):
            return "cancelled"
        return "lost" if issubclass(error, EngineDeadError) else "failed"
