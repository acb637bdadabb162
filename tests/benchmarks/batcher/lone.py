"""Latency that batching adds to a single record, and the size of batches under load."""

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
    """Return an opener of a batcher with a `submit`, with default settings."""

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
    """Open `@serve.batch` with default settings."""
    yield serve_batch(process)


async def added_latency(opened: Open) -> float:
    """Return the median milliseconds from call to result, with an empty function."""
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
    """Return the mean number of records in a batch under a load."""
    sizes = []

    async def process(records: list[int]) -> list[int]:
        sizes.append(len(records))
        await asyncio.sleep(batch_s)
        return records

    async with opened(process) as call:
        await load(call)
    return statistics.fmean(sizes)


async def callers(call: Call) -> None:
    """Send records from many callers, each of which awaits a result before it sends the next record."""
    numbers = iter(range(LOAD_RECORDS))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def arrivals(call: Call) -> None:
    """Send records at random times, independent of results."""
    loop = asyncio.get_running_loop()
    draw = random.Random(1)
    at = loop.time()
    pending = []
    for number in range(LOAD_RECORDS):
        at += draw.expovariate(RATE)
        # A timer is late by a millisecond or so; records that are due by then arrive at once.
        if (pause := at - loop.time()) > 0:
            await asyncio.sleep(pause)
        pending.append(asyncio.ensure_future(call(number)))
    await asyncio.gather(*pending)


async def batch_of_callers(opened: Open) -> float:
    """Return the mean batch size with callers that await their results."""
    return await mean_batch(opened, SHORT_S, callers)


async def batch_of_arrivals(opened: Open) -> float:
    """Return the mean batch size with records at random times."""
    return await mean_batch(opened, LONG_S, arrivals)


def sample(run: Callable[[Open], Coroutine[Any, Any, float]], opened: Open) -> Sample:
    """Return the sample of a run."""
    return lambda: asyncio.run(run(opened))


def measure(options: Options) -> Table:
    """Return the table of latencies of single records and of batch sizes under load."""
    flyte = flyte_batcher()
    opens: dict[str, Open] = {"ours": submitting(DynamicBatcher), "@serve.batch": serve_opened}
    if flyte is not None:
        opens["flyte"] = submitting(flyte)
    rows = []
    for title, run, unit, at_most, at_least in (
        ("single record: added latency", added_latency, "ms", 1.0, None),
        (f"{CALLERS} callers: mean batch", batch_of_callers, "records", None, 0.9 * CALLERS),
        (f"{RATE:,.0f} records/s: mean batch", batch_of_arrivals, "records", None, 0.9 * RATE * LONG_S),
    ):
        samples = {name: sample(run, opened) for name, opened in opens.items()}
        found = interleave(title, samples, options.pairs, warm_up=False)
        rows.append(Row(f"{title}, ours", unit, found.pop("ours"), at_most, at_least))
        rows += [Row(f"{title}, {name}", unit, found[name]) for name in found]
    setting = (
        f"default settings everywhere. A single record: one at a time, {PAUSE_S * 1e3:.0f} ms after the last "
        f"result, empty function. Under load: {CALLERS} callers and {SHORT_S * 1e3:.0f} ms per batch; "
        f"{RATE:,.0f} random arrivals a second and {LONG_S * 1e3:.0f} ms per batch, during which "
        f"{RATE * LONG_S:.0f} come."
    )
    return Table(setting if flyte else f"{setting} {NO_FLYTE}.", rows)
