"""The door of an Engine: every job is admitted here, before anything else is done with it."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from batcher import Aborted, BatcherError, ContinuousBatcher, Expired, Oversize, QueueFull, Slot
from serve_app.api.errors import EngineAwayError, RequestError
from serve_app.engine.adapters import AdapterSlots
from serve_app.engine.grammars import Recent
from serve_app.engine.job import Job

if TYPE_CHECKING:
    # vLLM takes seconds and a gigabyte.
    from serve_app.engine.vllm.lora import Adapters

STARTING = 8
"""Background jobs between the door and the engine at once: their templates, tokens and grammars are made.

The rest waits in the order of the batcher. Live jobs have no such bound: a job that fetches slow media holds
no other live job up. This is also the bound on jobs that run no model, such as jobs of `/tokenize`.
"""

GRAMMAR, ADAPTER = "grammar ", "adapter "
"""Needs of jobs beside cost; the tenant of a grammar follows, or the id of an adapter."""


class EngineLanes:
    """The needs of jobs beside cost: places of adapters, and one new grammar of each tenant at a time.

    Args:
        adapters: The places of adapters on the device.
    """

    def __init__(self, adapters: AdapterSlots) -> None:
        self._adapters = adapters
        self._grammars: set[str] = set()

    def take(self, need: str) -> bool:
        """Take a need for one job; False: there is none left now."""
        if need.startswith(ADAPTER):
            return self._adapters.take(need[len(ADAPTER) :])
        if need in self._grammars:
            return False
        self._grammars.add(need)
        return True

    def give(self, need: str) -> bool:
        """Give a need back; return whether a need that was refused may be had now."""
        if need.startswith(ADAPTER):
            return self._adapters.give(need[len(ADAPTER) :])
        self._grammars.discard(need)
        return True

    def unwanted(self, need: str) -> bool:
        """Take note that no job waits for a need any more; return as `give` does."""
        return need.startswith(ADAPTER) and self._adapters.unwanted(need[len(ADAPTER) :])


class Door:
    """Admits jobs: deadline, cost, places, adapter and grammars are one decision, in one order.

    A job gets its slot before vLLM's application sees it, on an upper bound of its tokens. The first prompt
    takes that slot, and corrects its cost. Further prompts of the job get slots of their own.

    Args:
        batcher: The order and the bounds of the engine's jobs.
        texts: The order of jobs that run no model, such as jobs of `/tokenize`: they wait for no KV cache.
        adapters: The LoRA adapters.
        context: Context of the model, in tokens.
        blocks: Rounds tokens up to whole blocks of the KV cache.
        max_values: Maximum answers and logprobs in the answer to a job.

    Attributes:
        unfit: Returns why no job can run now; None: jobs can run.
    """

    unfit: Callable[[], RequestError | None]

    def __init__(
        self,
        batcher: ContinuousBatcher,
        texts: ContinuousBatcher,
        adapters: "Adapters",
        *,
        context: int,
        blocks: Callable[[int], int],
        max_values: int,
    ) -> None:
        self.max_values = max_values
        self.batcher = batcher
        self._texts = texts
        self._adapters = adapters
        self._context = context
        self._blocks = blocks
        self._known = Recent()

    async def admit(self, job: Job) -> None:
        """Admit a job: return when it may run now, with all that it needs.

        Raises:
            RequestError: It is wrong, can't be served now, or its time is over.
        """
        if not await self.enter(job):
            await self.wait(job)

    async def enter(self, job: Job) -> bool:
        """Put a job into the queue; return whether it may run already, and else is to `wait`.

        Raises:
            RequestError: It is wrong, can't be served now, or its time is over.
        """
        if refusal := self.unfit():
            raise refusal
        self._check_values(job.facts.values)
        if adapter := job.request.adapter:
            await self._adapters.check(adapter)
        slot = job.slot = self._slot(job)
        if job.request.resumes:
            # A stream that goes on is never refused: it waits for space too.
            return False
        try:
            slot.enter_nowait()
        except BatcherError as error:
            raise refusal_of(error) from None
        job.admitted = slot.running
        return job.admitted

    def count(self, job: Job, values: int) -> None:
        """Count what vLLM makes for a prompt of a job, before any prompt of it runs.

        Args:
            job: The job.
            values: Answers, and logprobs of tokens.

        Raises:
            RequestError: 400, the answer would hold the event loop.
        """
        job.values += values
        self._check_values(job.values)

    def _check_values(self, values: int) -> None:
        if values > self.max_values:
            message = (
                f"the answer would have {values} values, and at most {self.max_values} are allowed "
                "(max_answer_values): each answer is one, and each logprob of a token; ask for fewer "
                "prompts, answers (n), tokens (max_tokens) or logprobs, or for a stream"
            )
            raise RequestError(400, "invalid_request_error", message)

    async def wait(self, job: Job) -> None:
        """Return when a job that has entered may run. Whoever accounts for the job gives its slot back.

        Raises:
            RequestError: It can't be served, or its time is over.
        """
        slot = job.slot
        assert slot is not None
        try:
            if not slot.entered:
                await slot.enter()
            await slot.started()
            if refusal := self.unfit():
                raise refusal
            if adapter := job.request.adapter:
                # The adapter may have been removed meanwhile.
                self._adapters.lora_request(adapter)
            job.admitted = True
        except BatcherError as error:
            raise refusal_of(error) from None

    async def further(self, job: Job, prompt_tokens: int, max_tokens: int) -> Slot:
        """Return the slot of one more prompt of a job once it has started. The caller holds `job.waiting`.

        Args:
            job: The job.
            prompt_tokens: Bound on the tokens of the prompt; more than the context counts as that.
            max_tokens: Maximum tokens of its answer.

        Raises:
            RequestError: The prompt can't run, or its time is over.
        """
        slot = self._further(job, *self._bound(prompt_tokens, max_tokens), deadline=job.deadline)
        try:
            await slot.enter()
            await slot.started()
        except BatcherError as error:
            raise refusal_of(error) from None
        return slot

    @asynccontextmanager
    async def place(self, job: Job, prompt_tokens: int, max_tokens: int, n: int) -> AsyncIterator[Slot]:
        """Hold a slot for one prompt of a job, at its exact cost.

        The first prompt has the job's own slot. Further prompts wait for theirs, a few at a time: a list may
        be longer than the queue, and leaves space in it.

        Args:
            job: The job.
            prompt_tokens: Tokens of KV cache for the prompt of each of the answers together.
            max_tokens: Tokens of KV cache for the answers together.
            n: Answers, which start together.

        Raises:
            RequestError: There is no slot for it.
        """
        slot, own = job.slot, False
        if slot is not None and not job.placed:
            job.placed = True
            own = slot.records >= n
            if not own:
                # The body stated fewer answers; to wait for more in this slot could be for ever.
                slot.release()
        if slot is None or not own:
            slot = self._further(job, prompt_tokens, max_tokens, n)
        failure: BaseException | None = None
        try:
            if not own:
                await self._enter_further(job, slot)
            self.correct(slot, prompt_tokens, max_tokens)
            if grammar := job.facts.grammar:
                # The engine can compile what the job asks for.
                self._known.set(grammar, "")
            yield slot
        except BaseException as raised:
            failure = raised
            raise
        finally:
            slot.release(failure)

    def correct(self, slot: Slot, prompt_tokens: int, max_tokens: int) -> None:
        """Set the exact cost of a slot whose prompt is made, and give back the needs that it was made with.

        Args:
            slot: The slot.
            prompt_tokens: Tokens of KV cache for the prompt of each of the answers together.
            max_tokens: Tokens of KV cache for the answers together.

        Raises:
            RequestError: The slot was given back: the client has left, and its prompt came too late.
        """
        if not slot.running:
            raise refusal_of(Aborted("the slot was given back before its prompt was made"))
        slot.correct(prompt_tokens, max_tokens)
        for need in slot.needs:
            if need.startswith(GRAMMAR):
                slot.give(need)

    async def _enter_further(self, job: Job, slot: Slot) -> None:
        """Return once a further slot of a job has started; a few wait at a time."""
        try:
            async with job.waiting:
                await slot.enter()
                await slot.started()
        except BatcherError as error:
            raise refusal_of(error) from None

    def _slot(self, job: Job) -> Slot:
        """Return the slot of a job, at the upper bound of its first prompt's cost."""
        facts = job.facts
        if not facts.runs:
            return self._texts.slot(
                0,
                priority=job.scheduling.priority,
                tenant=self._weigh(job, self._texts),
                deadline=job.deadline,
            )
        context, n = self._context, facts.answers
        prompt = context if facts.prompt is None else facts.prompt
        output = context if facts.output is None else max(0, facts.output)
        needs = self._adapter_need(job)
        if facts.grammar and self._known.get(facts.grammar) is None:
            needs += (GRAMMAR + job.scheduling.tenant,)
        return self._batcher_slot(job, *self._bound(prompt, output, n), n, job.deadline, needs)

    def _bound(self, prompt: int, output: int, n: int = 1) -> tuple[int, int]:
        """Return bounds on the tokens of KV cache for a prompt of each of `n` answers, and for the answers.

        A bound beyond the engine says nothing of the exact cost, so it counts as the whole engine.
        """
        prompt, capacity = min(prompt, self._context), self.batcher.capacity
        reserved = min(n * self._blocks(prompt), capacity)
        whole = min(n * self._blocks(min(prompt + output, self._context)), capacity)
        return reserved, whole - reserved

    def _further(
        self, job: Job, prompt_tokens: int, max_tokens: int, n: int = 1, deadline: float | None = None
    ) -> Slot:
        return self._batcher_slot(job, prompt_tokens, max_tokens, n, deadline, self._adapter_need(job))

    def _batcher_slot(
        self, job: Job, prompt: int, output: int, n: int, deadline: float | None, needs: tuple[str, ...]
    ) -> Slot:
        return self.batcher.slot(
            prompt_tokens=prompt,
            max_tokens=output,
            priority=job.scheduling.priority,
            tenant=self._weigh(job, self.batcher),
            deadline=deadline,
            records=n,
            needs=needs,
        )

    def _weigh(self, job: Job, batcher: ContinuousBatcher) -> str:
        share = job.share
        batcher.weigh(share, job.scheduling.weight)
        return share

    def _adapter_need(self, job: Job) -> tuple[str, ...]:
        adapter = job.request.adapter
        return (ADAPTER + adapter,) if adapter else ()


def refusal_of(error: BatcherError) -> RequestError:
    """Return the client's error for an error of the batcher."""
    match error:
        case QueueFull():
            seconds = max(1, math.ceil(error.retry_after_s))
            message = f"The queue of this model is full. Try again in {seconds} s."
            return RequestError(429, "rate_limit_error", message, retry_after_s=error.retry_after_s)
        case Expired():
            return RequestError(408, "timeout_error", "The request could not start in the time it allows.")
        case Oversize(what=str()):
            message = (
                f"n: {error.cost} answers must start together, and the engine runs {error.limit} at once"
            )
            return RequestError(400, "invalid_request_error", message, param="n")
        case Oversize():
            return RequestError(400, "invalid_request_error", str(error))
        case _:
            return EngineAwayError("This replica is shutting down. Try again.")
