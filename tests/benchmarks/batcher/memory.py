"""Memory of a queued record, and of the records that have passed through."""

import asyncio
import gc
import multiprocessing
import sys
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil

from batcher import ContinuousBatcher, DynamicBatcher, Entry, RequestQueue
from tests.benchmarks.batcher.rivals import NO_FLYTE, flyte_batcher, serve_batch
from tests.benchmarks.measuring import Options, Row, Table, progress

QUEUED = 50_000
PASSED = 10_000_000
QUICK_PASSED = 1_000_000
PARTS = 20
TENANTS = [f"tenant-{number}" for number in range(16)]

Hold = Callable[[], Coroutine[Any, Any, float]]


class Traced:
    """Counts the bytes that are allocated from now on and still there in the end."""

    def __init__(self) -> None:
        gc.collect()
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]

    def per_record(self) -> float:
        """Return the bytes per queued record."""
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - self._before
        tracemalloc.stop()
        return held / QUEUED


class Held:
    """A function of a batch that takes until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, records: list[int]) -> list[int]:
        await self.opened.wait()
        return records


async def bare_future() -> float:
    """A list of futures."""
    loop = asyncio.get_running_loop()
    traced = Traced()
    held: list[Any] = [loop.create_future() for _ in range(QUEUED)]
    found = traced.per_record()
    del held
    return found


async def bare_task() -> float:
    """Tasks that wait for a future each."""
    loop = asyncio.get_running_loop()

    async def caller() -> None:
        await loop.create_future()

    traced = Traced()
    tasks = [asyncio.ensure_future(caller()) for _ in range(QUEUED)]
    await asyncio.sleep(0)
    found = traced.per_record()
    for task in tasks:
        task.cancel()
    return found


async def queue_entry() -> float:
    """`Entry` in a `RequestQueue`."""
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=time.monotonic)
    traced = Traced()
    for number in range(QUEUED):
        queue.add(Entry(None, 1, number % 3, TENANTS[number % len(TENANTS)]))
    return traced.per_record()


async def ticket() -> float:
    """A record in a `DynamicBatcher`, future included."""
    held = Held()
    async with DynamicBatcher(held, max_queue_size=2 * QUEUED) as batcher:
        traced = Traced()
        for number in range(QUEUED):
            await batcher.submit(
                0, estimated_cost=1, priority=number % 3, tenant=TENANTS[number % len(TENANTS)]
            )
        await asyncio.sleep(0)
        found = traced.per_record()
        held.opened.set()
    return found


async def slot() -> float:
    """A caller that waits for a slot of a `ContinuousBatcher`, its task included."""
    async with ContinuousBatcher(capacity=1, max_queue_size=2 * QUEUED) as batcher:

        async def caller(number: int) -> None:
            async with batcher.slot(1, number % 3, TENANTS[number % len(TENANTS)]):
                pass

        async with batcher.slot(1):
            traced = Traced()
            tasks = [asyncio.ensure_future(caller(number)) for number in range(QUEUED)]
            await asyncio.sleep(0)
            found = traced.per_record()
        await asyncio.wait(tasks)
    return found


async def serve_caller() -> float:
    """A caller that waits for `@serve.batch`, its task included: there is no other way to wait."""
    held = Held()
    call = serve_batch(held, max_batch_size=256)
    traced = Traced()
    tasks = [asyncio.ensure_future(call(0)) for _ in range(QUEUED)]
    await asyncio.sleep(0)
    found = traced.per_record()
    held.opened.set()
    await asyncio.wait(tasks)
    return found


def flyte_record(batcher_class: Any) -> Hold:
    """A record in the seeds' batcher, future included."""

    async def hold() -> float:
        held = Held()
        async with batcher_class(held, max_queue_size=2 * QUEUED) as batcher:
            traced = Traced()
            for _ in range(QUEUED):
                await batcher.submit(0, estimated_cost=1)
            found = traced.per_record()
            held.opened.set()
        return found

    return hold


async def pass_through(records: int) -> tuple[list[float], list[float]]:
    """Return resident MiB and allocated blocks at rest, after each part of the records has passed.

    Every hundredth record is a new tenant's, every tenth has a deadline, every thousandth is cancelled.
    """

    async def process(batch: list[int]) -> list[int]:
        return batch

    resident: list[float] = []
    blocks: list[float] = []
    this = psutil.Process()
    part = records // PARTS
    async with DynamicBatcher(process, max_batch_size=64) as batcher:
        for number in range(PARTS):
            progress(f"memory: {number * part:,} of {records:,} records have passed")
            for record in range(number * part, (number + 1) * part):
                future = await batcher.submit(
                    record,
                    estimated_cost=1,
                    priority=record % 3,
                    tenant=f"tenant-{record // 100}" if record % 100 == 0 else TENANTS[record % len(TENANTS)],
                    deadline=time.monotonic() + 60 if record % 10 == 0 else None,
                )
                if record % 1000 == 999:
                    future.cancel()
            await batcher.submit_nowait(0, estimated_cost=1, priority=9)
            del future
            gc.collect()
            resident.append(this.memory_info().rss / 2**20)
            blocks.append(sys.getallocatedblocks())
    progress("")
    return resident, blocks


def passed_through(records: int) -> tuple[list[float], list[float]]:
    """Return what `pass_through` does; for a process of its own."""
    return asyncio.run(pass_through(records))


def measure(options: Options) -> Table:
    """Return bytes per queued record, and what grew while many passed."""
    flyte = flyte_batcher()
    holds: dict[str, Hold] = {
        "a bare future": bare_future,
        "a bare future, with a task": bare_task,
        "ours, RequestQueue": queue_entry,
        "ours, DynamicBatcher": ticket,
        "ours, ContinuousBatcher, with a task": slot,
        "@serve.batch, with a task": serve_caller,
    }
    if flyte is not None:
        holds["flyte"] = flyte_record(flyte)
    records = QUICK_PASSED if options.quick else PASSED
    # In a process of its own: what this one has freed and not given back would hide a leak.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        resident, blocks = fresh.submit(passed_through, records).result()
    rows = []
    for name, hold in holds.items():
        progress(f"memory: {name}")
        rows.append(Row(f"per queued record: {name}", "bytes", [asyncio.run(hold())]))
    progress("")
    # The first half fills what is bounded, such as the memory of tenants that are idle.
    half = PARTS // 2
    rows += [
        Row(f"after {records // PARTS:,} records: resident", "MiB", resident[:1]),
        Row(f"after {records:,} records: resident", "MiB", resident[-1:]),
        Row("growth over the second half: resident", "MiB", [resident[-1] - resident[half - 1]], at_most=1.0),
        Row(
            "growth over the second half: blocks per thousand records",
            "",
            [(blocks[-1] - blocks[half - 1]) / (records / 2) * 1000],
            at_most=1.0,
        ),
    ]
    setting = (
        f"bytes by tracemalloc with {QUEUED:,} records queued. And {records:,} records pass through a "
        "DynamicBatcher, with priorities, ever new tenants, deadlines and cancellations; memory is read "
        "whenever a twentieth of them has passed and none waits."
    )
    return Table(setting if flyte else f"{setting} {NO_FLYTE}.", rows)
