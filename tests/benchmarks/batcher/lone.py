"""Cost of a wait for other records to one that stays alone, and sizes of batches where others come."""

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from batcher import DynamicBatcher
from tests.benchmarks.batcher.rivals import NO_FLYTE, flyte_batcher, serve_batch
from tests.benchmarks.measuring import Options, Row, Sample, Table, interleave

LONE_RECORDS = 40
PAUSE_S = 0.005
LOAD_RECORDS = 2_000
CALLERS = 64
SHORT_S = 0.002
RATE = 2_000.0
LONG_S = 0.02

ProcessFn = Callable[[list[int]], Awaitable[list[int]]]
Call = Callable[[int], Awaitable[int]]
Open = Callable[[ProcessFn], Any]


def submitting(batcher_class: Any) -> Open:
    """Return how to open a batcher that has a `submit`, with the settings it has when none are given."""

    @asynccontextmanager
    async def opened(process: ProcessFn) -> AsyncIterator[Call]:
        async with batcher_class(process) as batcher:

            async def call(number: int) -> int:
                result: int = await (await batcher.submit(number, estimated_cost=1))
                return result

            yield call

    return opened


@asynccontextmanager
async def serve_opened(process: ProcessFn) -> AsyncIterator[Call]:
    """Open `@serve.batch` with the settings it has when none are given."""
    yield serve_batch(process)


async def added_latency(opened: Open) -> float:
    """Return the median milliseconds from call to result, when the function takes none of them."""
    loop = asyncio.get_running_loop()

    async def process(records: list[int]) -> list[int]:
        return records

    took = []
    async with opened(process) as call:
        for number in range(LONE_RECORDS):
            await asyncio.sleep(PAUSE_S)
            started = loop.time()
            await call(number)
            took.append(loop.time() - started)
    return statistics.median(took) * 1e3


async def mean_batch(opened: Open, batch_s: float, load: Callable[[Call], Awaitable[None]]) -> float:
    """Return the mean number of records in a batch under some load."""
    sizes = []

    async def process(records: list[int]) -> list[int]:
        sizes.append(len(records))
        await asyncio.sleep(batch_s)
        return records

    async with opened(process) as call:
        await load(call)
    return statistics.fmean(sizes)


async def callers(call: Call) -> None:
    """Some callers, each of which sends its next record when it has its result."""
    numbers = iter(range(LOAD_RECORDS))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def arrivals(call: Call) -> None:
    """Records that arrive at random, whether or not there are results."""
    loop = asyncio.get_running_loop()
    draw = random.Random(1)
    at = loop.time()
    pending = []
    for number in range(LOAD_RECORDS):
        at += draw.expovariate(RATE)
        # A timer is late by a millisecond or so; whatever is due by then arrives at once.
        if (pause := at - loop.time()) > 0:
            await asyncio.sleep(pause)
        pending.append(asyncio.ensure_future(call(number)))
    await asyncio.gather(*pending)


async def batch_of_callers(opened: Open) -> float:
    """Return the mean batch when each caller waits for its result."""
    return await mean_batch(opened, SHORT_S, callers)


async def batch_of_arrivals(opened: Open) -> float:
    """Return the mean batch when records come whether or not there are results."""
    return await mean_batch(opened, LONG_S, arrivals)


def sample(run: Callable[[Open], Coroutine[Any, Any, float]], opened: Open) -> Sample:
    """Return one run as a sample."""
    return lambda: asyncio.run(run(opened))


def measure(options: Options) -> Table:
    """Return latencies of lone records and sizes of batches under load."""
    flyte = flyte_batcher()
    opens: dict[str, Open] = {"ours": submitting(DynamicBatcher), "@serve.batch": serve_opened}
    if flyte is not None:
        opens["flyte"] = submitting(flyte)
    rows = []
    for title, run, unit, at_most, at_least in (
        ("lone record: added latency", added_latency, "ms", 1.0, None),
        (f"{CALLERS} callers: mean batch", batch_of_callers, "records", None, 0.9 * CALLERS),
        (f"{RATE:,.0f} records/s: mean batch", batch_of_arrivals, "records", None, 0.9 * RATE * LONG_S),
    ):
        samples = {name: sample(run, opened) for name, opened in opens.items()}
        found = interleave(title, samples, options.rounds, warm_up=False)
        rows.append(Row(f"{title}, ours", unit, found.pop("ours"), at_most, at_least))
        rows += [Row(f"{title}, {name}", unit, found[name]) for name in found]
    setting = (
        f"default settings everywhere. A lone record: one at a time, {PAUSE_S * 1e3:.0f} ms after the last "
        f"result, empty function. Under load: {CALLERS} callers and {SHORT_S * 1e3:.0f} ms per batch; "
        f"{RATE:,.0f} random arrivals a second and {LONG_S * 1e3:.0f} ms per batch, during which "
        f"{RATE * LONG_S:.0f} come."
    )
    return Table(setting if flyte else f"{setting} {NO_FLYTE}.", rows)
