"""ContinuousBatcher: a window of in-flight cost in front of an engine that batches for itself."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TypedDict, Unpack

from batcher import checks
from batcher.costs import RecordT, whole_cost
from batcher.entries import ResultT
from batcher.goals import Goals
from batcher.stats import ContinuousStats, Load
from batcher.window import Slot, Window


class SlotOptions(TypedDict, total=False):
    """The arguments of `ContinuousBatcher.slot` beside `cost` and `wait`."""

    priority: int
    tenant: str
    deadline: float | None
    timeout: float | None
    prompt_tokens: int | None
    max_tokens: int | None
    records: int
    arrived_at: float | None


class ContinuousBatcher(Window):
    """Admits records to an engine that batches continuously, by what they cost.

    A record starts when its cost fits into what is left of `capacity`, in the order of `RequestQueue`,
    and leaves when its block ends. A batch is never frozen::

        async with ContinuousBatcher(capacity=40_000) as batcher:
            async with batcher.slot(len(prompt) + max_tokens, tenant=user):
                ...

    Args:
        capacity: Cost that may run at once, in tokens of KV cache for an LLM.
        max_running: Records that may run at once; None: no bound but `places`. A slot of more records than
            either is refused.
        places: Records in one step of the engine, which queues what is beyond. So many run, and as many wait
            there as end until others could come: so no place stays empty. None: there is no such limit.
        max_queue_size: Records that may wait; see `RequestQueue` for the part of a tenant.
        max_queue_cost: Cost that may wait; None: no bound.
        policy: What a record reserves that names its tokens. "guaranteed_no_evict": `prompt_tokens` and
            `max_tokens`, so what runs can always finish. "max_utilization": the prompt and the output that
            finished requests lead to expect, corrected by `Slot.report`.
        oversize: What becomes of a record that costs more than the capacity: "reject" refuses it,
            "alone" lets it run with nothing beside it.
        priority_aging_s, tenant_weights: See `RequestQueue`.
        goals: Goals of the tiers before `background`: the others run as far as these allow, and leave space
            for them. They take calls of `step` and `Slot.first_token`. None: all tiers share the window.
        background: The priority from which on records are background, where there are goals.
        clock: Returns the time in seconds, which never goes back; deadlines are on it.

    An argument out of range raises ValueError, one of a wrong type TypeError; the message names it.
    """

    @property
    def stats(self) -> ContinuousStats:
        """A snapshot, true at this moment."""
        now = self._clock()
        return ContinuousStats(
            **self._common_stats(now),
            running=self._background.total,
            running_cost=self._background.total_cost,
            capacity=self._capacity,
            max_running=None if self._regular == sys.maxsize else self._regular,
            outside_cost=self._queue.outside_cost,
            **self._recorder.window(now),  # type: ignore[arg-type]
            **self._background.stats(),  # type: ignore[arg-type]
        )

    def slot(
        self,
        cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        wait: bool = False,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        records: int = 1,
        arrived_at: float | None = None,
    ) -> Slot:
        """Return the place of one record, to be entered with `async with`.

        Args:
            cost: What the record holds while it runs; or else `prompt_tokens` and `max_tokens`.
            priority, tenant: Its tier, lower goes first, and the name of its tenant.
            deadline: Time on `clock` by which it must have started.
            wait: Wait for space when the queue is full; False: entering raises `QueueFull`, as suits a
                server that can answer at once.
            prompt_tokens, max_tokens: Tokens of the prompt, and the most that may be produced.
            timeout: The deadline in seconds from now.
            records: Records that start together in this slot: it takes as many places in the window and in
                the queue, and its cost and its tokens are those of all of them.
            arrived_at: Time on `clock` from which its TTFT counts for goals, as its request was under way
                before; None: its submission.

        Raises:
            ValueError: Neither or both ways of giving a cost are used.
            Expired: The deadline has passed. Entering raises it for a deadline that can't be kept, too.
            QueueFull: On entering: the queue is full, and `wait` is False.
            Oversize: On entering: the record can never run.
            RuntimeError: On entering: the batcher isn't running (`Closed`), or runs on another event loop.
        """
        if cost is None and prompt_tokens is not None and max_tokens is not None:
            prompt_tokens = whole_cost("prompt_tokens", prompt_tokens)
            max_tokens = whole_cost("max_tokens", max_tokens)
            checks.whole("records", records, 1)
            cost = prompt_tokens + self._reserved(max_tokens, records)
        elif cost is None or prompt_tokens is not None or max_tokens is not None:
            raise ValueError("give either cost, or both prompt_tokens and max_tokens")
        # It is a future only once it has to wait.
        slot = Slot(None, cost, priority, tenant, deadline, records, withdraw=self._withdraw)
        if timeout is not None:
            slot.deadline = self._deadline(deadline, timeout, self._clock(), records)
        if arrived_at is not None:
            checks.instant("arrived_at", arrived_at)
            slot.arrived_at = arrived_at
        slot._batcher, slot.wait = self, wait
        slot.prompt_tokens, slot.max_tokens = prompt_tokens, max_tokens
        return slot

    async def submit(
        self,
        process_fn: Callable[[RecordT], Awaitable[ResultT]],
        record: RecordT,
        cost: int | None = None,
        *,
        wait: bool = True,
        **options: Unpack[SlotOptions],
    ) -> asyncio.Task[ResultT]:
        """Queue one record and return the task that will run `process_fn(record)` in a slot.

        Returns once the record is in the queue. Cancelling the task takes it out, or cancels `process_fn`.
        The other arguments and the errors are those of `slot` and of entering it.
        """
        checks.function("process_fn", process_fn)
        slot = self.slot(cost, wait=wait, **options)
        self._enter_slot(slot)
        if not slot.admitted:
            try:
                await self._wait_for_space(slot)
            except BaseException as error:
                self._leave(slot, error)
                raise

        async def process() -> ResultT:
            async with slot:
                return await process_fn(record)

        task = self.loop.create_task(process())
        self._tasks[task] = slot
        # A task that is cancelled before its first step never gets to leave its slot by itself.
        task.add_done_callback(lambda _: self._leave(self._tasks.pop(task), asyncio.CancelledError()))
        return task

    def set_queue_size(self, max_queue_size: int) -> None:
        """Change the records that may wait, also while records wait; those beyond a smaller number stay."""
        checks.whole("max_queue_size", max_queue_size, 1)
        self._queue.set_max_size(max_queue_size)
        self._decide()

    def set_goals(self, goals: Goals) -> None:
        """Change the goals, also while records run; ValueError if the batcher was made without any."""
        if self._background.goals is None:
            raise ValueError("the batcher was made without goals")
        self._background.goals = goals

    @property
    def load(self) -> Load:
        """What runs and waits at this moment."""
        queue = self._queue
        tier = queue.first_priority() or 0
        return Load(self._background.total, queue.total, queue.total_cost, tier, queue.next_deadline())

    def step(self, seconds: float) -> None:
        """Take in how many seconds a step of the engine took, for goals."""
        checks.seconds("seconds", seconds)
        if self._background.step(seconds) and self._queue.total:
            self._decide()
