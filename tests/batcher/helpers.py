"""Helpers for the tests of the batchers: a process function, holders of slots, and checks of the books."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from batcher import ContinuousBatcher, DynamicBatcher, Entry, RequestQueue, Slot
from tests.batcher.virtual import blocked, now
from tests.fakes.clock import Clock

# DynamicBatcher


class Machine:
    """A process function that takes a second per batch, or waits to be told, and remembers its batches."""

    def __init__(self, seconds: float = 1.0, *, held: bool = False) -> None:
        self.seconds = seconds
        self.batches: list[list[Any]] = []
        self.starts: list[float] = []
        self.running = 0
        self.most = 0
        self._go = asyncio.Event()
        if not held:
            self._go.set()

    async def __call__(self, batch: list[Any]) -> list[Any]:
        self.batches.append(list(batch))
        self.starts.append(now())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._go.wait()
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return [f"<{record}>" for record in batch]

    def go(self) -> None:
        self._go.set()

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


async def refusing_bad(batch: list[str]) -> list[str]:
    """Take a second, and raise a ValueError if a record is "bad"."""
    await asyncio.sleep(1)
    if "bad" in batch:
        raise ValueError
    return batch


def dynamic_batcher(process: Callable[[list[Any]], Any], **settings: Any) -> DynamicBatcher[Any, Any]:
    """Return a batcher on virtual time."""
    return DynamicBatcher(process, clock=now, **settings)


def one_by_one(process: Callable[[list[Any]], Any], **settings: Any) -> DynamicBatcher[Any, Any]:
    """Return a batcher with one record per batch, and nothing between the queue and its start."""
    return dynamic_batcher(process, max_batch_size=1, prefetch_batches=0, **settings)


async def results_of(futures: Sequence["asyncio.Future[Any]"]) -> list[Any]:
    """Return the result or the error of each record."""
    return await asyncio.gather(*futures, return_exceptions=True)


def check_books(batcher: DynamicBatcher[Any, Any] | ContinuousBatcher) -> None:
    """Check that each record that was submitted has ended, waits or runs."""
    stats = batcher.stats
    ended = stats.total_completed + stats.total_failed + stats.total_cancelled + stats.total_expired
    assert stats.total_submitted == ended + stats.queue_depth + stats.running


# ContinuousBatcher


class Holders:
    """Tasks that each hold one slot until told to leave.

    Attributes:
        inside: Those that hold theirs.
        started: All that have got one so far, in that order.
    """

    def __init__(self, batcher: ContinuousBatcher) -> None:
        self.batcher = batcher
        self.inside: list[str] = []
        self.started: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._exits: dict[str, asyncio.Event] = {}

    @property
    def order(self) -> str:
        """The names of `started` as one word."""
        return "".join(self.started)

    async def enter(self, name: str, cost: int | None = 10, *, wait: bool = False, **options: object) -> None:
        """Start a holder and return when it is inside, blocked, or refused because it may not `wait`."""
        self._exits[name] = asyncio.Event()
        make_slot = self.batcher.slot if wait else self.batcher.slot_nowait
        task = self.tasks[name] = asyncio.create_task(self._hold(name, make_slot, cost, options))
        # The end of a test refuses those that wait, and Python reports errors that nobody asks for.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await blocked()

    async def enter_all(self, names: Iterable[str]) -> None:
        """Start holders, one after the other."""
        for name in names:
            await self.enter(name)

    async def leave(self, *names: str) -> None:
        """Let some leave as soon as they are inside."""
        for name in names:
            self._exits[name].set()
        await blocked()

    async def leave_all(self) -> None:
        """Let all leave, and wait for their end."""
        await self.leave(*self.tasks)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await blocked()

    async def _hold(
        self, name: str, make_slot: Callable[..., Slot], cost: int | None, options: dict[str, object]
    ) -> None:
        async with make_slot(cost, **options):
            self.inside.append(name)
            self.started.append(name)
            try:
                await self._exits[name].wait()
            finally:
                self.inside.remove(name)


def continuous_batcher(capacity: int = 100, **settings: object) -> ContinuousBatcher:
    """Return a batcher on virtual time."""
    return ContinuousBatcher(capacity=capacity, clock=now, **settings)  # type: ignore[arg-type]


def check_empty(batcher: ContinuousBatcher) -> None:
    """Check that nothing runs or waits, and each record that was submitted has ended."""
    stats = batcher.stats
    assert (stats.running, stats.running_cost, stats.queue_depth, stats.queue_cost) == (0, 0, 0, 0)
    check_books(batcher)


# RequestQueue


def queue_of(clock: Clock | None = None, **settings: object) -> RequestQueue[Entry[Any]]:
    """Return a queue on a clock that the test moves."""
    return RequestQueue(clock=clock or Clock(), **settings)  # type: ignore[arg-type]


def add(queue: RequestQueue[Entry[Any]], *names: str, cost: int = 1, **fields: object) -> list[Entry[Any]]:
    """Add entries that are alike but for their names."""
    entries: list[Entry[Any]] = [Entry(name, cost, **fields) for name in names]  # type: ignore[arg-type]
    for entry in entries:
        queue.add(entry)
    return entries
