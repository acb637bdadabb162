"""Cost of entering and leaving a slot of the ContinuousBatcher."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from batcher import ContinuousBatcher
from tests.benchmarks.measuring import Options, Row, Table, cpu_us_per_record, interleave, ratios

PLACES = 64
CALLERS = 1_024
TENANTS = [f"tenant-{number}" for number in range(16)]

Enter = Callable[[int], AbstractAsyncContextManager[Any]]


async def alone(count: int, enter: Enter) -> None:
    """One caller, for which there is always space."""
    for number in range(count):
        async with enter(number):
            pass


async def crowded(count: int, enter: Enter) -> None:
    """Many more callers than places, each of which holds its place for one pass of the event loop."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            async with enter(number):
                await asyncio.sleep(0)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


def _slots(batcher: ContinuousBatcher) -> Enter:
    return lambda number: batcher.slot(10, number % 3, TENANTS[number % len(TENANTS)])


async def ours_alone(count: int) -> None:
    """Space for all."""
    async with ContinuousBatcher(capacity=10 * PLACES) as batcher:
        await alone(count, _slots(batcher))


async def ours_crowded(count: int) -> None:
    """Priorities and tenants in use."""
    async with ContinuousBatcher(capacity=10 * PLACES) as batcher:
        await crowded(count, _slots(batcher))


async def semaphore_alone(count: int) -> None:
    """The floor."""
    semaphore = asyncio.Semaphore(PLACES)
    await alone(count, lambda number: semaphore)


async def semaphore_crowded(count: int) -> None:
    """The floor."""
    semaphore = asyncio.Semaphore(PLACES)
    await crowded(count, lambda number: semaphore)


def measure(options: Options) -> Table:
    """Return µs of CPU per slot, beside those of a semaphore that knows neither cost nor order."""
    runs = {
        "alone: asyncio.Semaphore": semaphore_alone,
        "alone: ours": ours_alone,
        "crowded: asyncio.Semaphore": semaphore_crowded,
        "crowded: ours": ours_crowded,
    }
    samples = {name: cpu_us_per_record(run, options.records) for name, run in runs.items()}
    found = interleave("slots", samples, options.rounds)
    rows = [Row(name, "µs", found[name]) for name in found]
    for case in ("alone", "crowded"):
        ratio = ratios(found[f"{case}: ours"], found[f"{case}: asyncio.Semaphore"])
        rows.append(Row(f"{case}: ours / asyncio.Semaphore", "x", ratio))
    setting = (
        f"CPU time to enter and leave one slot, {options.records:,} times. Alone: one caller, always space. "
        f"Crowded: {CALLERS:,} callers for {PLACES} places, 3 priorities, {len(TENANTS)} tenants; each holds "
        "its place for one pass of the event loop, which is in the figures."
    )
    return Table(setting, rows)
