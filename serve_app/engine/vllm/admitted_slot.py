"""The slot of the batcher that a request of vLLM runs in.

The imports are those of vLLM 0.32.
"""

import asyncio
import functools
import time
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from batcher import BatcherError, ContinuousBatcher, Slot
from serve_app.engine.admission import current, refusal_of
from serve_app.engine.vllm.refusal import RefusedError
from serve_app.engine.vllm.usage import set_part
from serve_app.ledger.calls import Part
from serve_app.ledger.rows import Outcome
from serve_app.relay.usage import PromptUsage


class AdmittedSlot:
    """A slot of the batcher for a request of vLLM; it fills in the request's `AdmissionResult`.

    Attributes:
        last: The last output of vLLM.
    """

    __slots__ = ("_length", "_make_slot", "_part", "_result", "_slot", "last")

    def __init__(
        self, batcher: ContinuousBatcher, prompt_tokens: int, max_tokens: int, length: int, n: int = 1
    ) -> None:
        self._length = length
        self._part: Part | None = None
        self.last: Any = None
        request, self._result = current()
        # The first slot of a request is refused when the queue is full; once it has one, the others wait, and
        # its deadline is met: a list may be longer than the queue.
        wait = request.wait or self._result.asked > 0
        deadline = None if self._result.admitted else request.deadline
        self._result.ask()
        share = request.share
        batcher.weigh(share, request.scheduling.weight)
        self._make_slot = functools.partial(
            batcher.slot if wait else batcher.slot_nowait,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            priority=request.scheduling.priority,
            tenant=share,
            deadline=deadline,
            records=n,
            arrived_at=request.arrived_at,
        )

    async def __aenter__(self) -> Slot:
        try:
            slot = self._slot = self._make_slot()
            await slot.__aenter__()
        except BatcherError as error:
            self._result.refusal = refusal_of(error)
            raise RefusedError(self._result.refusal) from None
        self._result.admitted = True
        if (call := self._result.call) is not None:
            self._part = call.part(slot.started_at - slot.submitted_at)
            # vLLM adds its sequences in this task, before it does anything else.
            set_part(self._part)
        return slot

    async def __aexit__(self, *exc: Any) -> None:
        slot = self._slot
        if self._part is not None:
            # Its sequences have ended before: their generator is closed first.
            self._part.end(self._outcome(exc[0]))
        await slot.__aexit__(*exc)
        cached = getattr(self.last, "num_cached_tokens", None) or 0
        self._result.usage.add(
            PromptUsage(
                slot.submitted_at,
                slot.started_at,
                time.monotonic(),
                self._length,
                slot.output_tokens,
                # A stream that goes on has more in the cache than its prompt.
                min(cached, self._length),
            )
        )

    def _outcome(self, error: type[BaseException] | None) -> Outcome:
        # A reader may leave the last output without waiting for the end.
        if error is None or (self.last is not None and self.last.finished):
            return "ok"
        if issubclass(error, (asyncio.CancelledError, GeneratorExit)):
            return "cancelled"
        return "lost" if issubclass(error, EngineDeadError) else "failed"
