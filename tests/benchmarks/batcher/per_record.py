"""CPU time of a batcher per record, with an empty function."""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from batcher import DynamicBatcher
from tests.benchmarks.batcher.rivals import NO_FLYTE, flyte_batcher, serve_batch
from tests.benchmarks.measuring import Options, Row, Table, cpu_us_per_record, interleave, ratios

MAX_BATCH_SIZE = 64
TIMEOUT_S = 0.02
MAX_QUEUE_SIZE = 5_000
CALLERS = 1_024
TENANTS = [f"tenant-{number}" for number in range(16)]
DEADLINE = 1e12

Run = Callable[[int], Coroutine[Any, Any, None]]


async def process(records: list[int]) -> list[int]:
    """Return the records: the empty function."""
    return records


def ours() -> DynamicBatcher[int, int]:
    """Return our batcher, with the limits of all candidates."""
    return DynamicBatcher(
        process, max_batch_size=MAX_BATCH_SIZE, batch_timeout_s=TIMEOUT_S, max_queue_size=MAX_QUEUE_SIZE
    )


async def closed_loop(count: int, call: Callable[[int], Awaitable[int]]) -> None:
    """Send records from many callers, each of which awaits a result before it sends the next record."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def ours_producer(count: int) -> None:
    """Run one producer, with priorities and tenants."""
    async with ours() as batcher:
        futures = [
            await batcher.submit(
                number, estimated_cost=1, priority=number % 3, tenant=TENANTS[number % len(TENANTS)]
            )
            for number in range(count)
        ]
        for future in futures:
            await future


async def ours_producer_deadlines(count: int) -> None:
    """Run one producer, with priorities, tenants and deadlines."""
    async with ours() as batcher:
        futures = [
            await batcher.submit(
                number,
                estimated_cost=1,
                priority=number % 3,
                tenant=TENANTS[number % len(TENANTS)],
                deadline=DEADLINE,
            )
            for number in range(count)
        ]
        for future in futures:
            await future


async def ours_producer_plain(count: int) -> None:
    """Run one producer without priorities and tenants, which the others don't have."""
    async with ours() as batcher:
        futures = [await batcher.submit(number, estimated_cost=1) for number in range(count)]
        for future in futures:
            await future


async def ours_callers(count: int) -> None:
    """Run many callers, with priorities and tenants."""
    async with ours() as batcher:

        async def call(number: int) -> int:
            return await (
                await batcher.submit(
                    number, estimated_cost=1, priority=number % 3, tenant=TENANTS[number % len(TENANTS)]
                )
            )

        await closed_loop(count, call)


async def ours_callers_plain(count: int) -> None:
    """Run many callers without priorities and tenants, which the others don't have."""
    async with ours() as batcher:

        async def call(number: int) -> int:
            return await (await batcher.submit(number, estimated_cost=1))

        await closed_loop(count, call)


def flyte_runs(batcher_class: Any) -> tuple[Run, Run]:
    """Return the runs of one producer and of many callers."""

    def theirs() -> Any:
        return batcher_class(
            process, max_batch_size=MAX_BATCH_SIZE, batch_timeout_s=TIMEOUT_S, max_queue_size=MAX_QUEUE_SIZE
        )

    async def producer(count: int) -> None:
        async with theirs() as batcher:
            futures = [await batcher.submit(number, estimated_cost=1) for number in range(count)]
            for future in futures:
                await future

    async def callers(count: int) -> None:
        async with theirs() as batcher:

            async def call(number: int) -> Any:
                return await (await batcher.submit(number, estimated_cost=1))

            await closed_loop(count, call)

    return producer, callers


async def serve_producer(count: int) -> None:
    """Run one producer in portions of the others' queue size, since `@serve.batch` has no bound."""
    call = serve_batch(process, max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=TIMEOUT_S)
    numbers = iter(range(count))
    while portion := list(itertools.islice(numbers, MAX_QUEUE_SIZE)):
        await asyncio.gather(*(call(number) for number in portion))


async def serve_callers(count: int) -> None:
    """Run many callers, each of which awaits its result."""
    handler = serve_batch(process, max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=TIMEOUT_S)

    async def call(number: int) -> int:
        return await handler(number)

    await closed_loop(count, call)


class Bare:
    """The minimum: a deque, a future per record, and one task that empties it in batches."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        self.task: asyncio.Task[None] | None = None

    def submit(self, record: int) -> "asyncio.Future[int]":
        """Queue one record and return the future of its result."""
        future: asyncio.Future[int] = self.loop.create_future()
        self.waiting.append((record, future))
        if self.task is None:
            self.task = self.loop.create_task(self._run())
        return future

    async def _run(self) -> None:
        waiting = self.waiting
        while waiting:
            batch = [waiting.popleft() for _ in range(min(MAX_BATCH_SIZE, len(waiting)))]
            results = await process([record for record, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)
            await asyncio.sleep(0)
        self.task = None


async def bare_producer(count: int) -> None:
    """Run one producer on the minimum."""
    bare = Bare()
    for future in [bare.submit(number) for number in range(count)]:
        await future


async def bare_callers(count: int) -> None:
    """Run many callers on the minimum."""
    bare = Bare()

    async def call(number: int) -> int:
        return await bare.submit(number)

    await closed_loop(count, call)


def measure(options: Options) -> Table:
    """Return the table of CPU time per record, and of ratios to the others."""
    flyte = flyte_batcher()
    runs: dict[str, dict[str, Run]] = {
        "one producer": {
            "bare future and deque": bare_producer,
            "ours": ours_producer,
            "ours, no priorities or tenants": ours_producer_plain,
            "ours, with deadlines": ours_producer_deadlines,
            "@serve.batch": serve_producer,
        },
        f"{CALLERS:,} callers": {
            "bare future and deque": bare_callers,
            "ours": ours_callers,
            "ours, no priorities or tenants": ours_callers_plain,
            "@serve.batch": serve_callers,
        },
    }
    if flyte is not None:
        for group, run in zip(runs.values(), flyte_runs(flyte), strict=True):
            group["flyte"] = run
    rows = []
    for drive, group in runs.items():
        samples = {name: cpu_us_per_record(run, options.records) for name, run in group.items()}
        found = interleave(f"per record, {drive}", samples, options.rounds)
        rows += [Row(f"{drive}: {name}", "µs", found[name]) for name in found]
        rows += [
            Row(f"{drive}: ours / {name}", "x", ratios(found["ours"], found[name]), at_most=limit)
            for name, limit in (("flyte", 0.35), ("@serve.batch", 0.8), ("bare future and deque", None))
            if name in found
        ]
        if "flyte" in found:
            plain = ratios(found["ours, no priorities or tenants"], found["flyte"])
            rows.append(Row(f"{drive}: ours, no priorities or tenants / flyte", "x", plain, at_most=0.35))
    setting = (
        f"CPU time per record, {options.records:,} records through an empty async function. All: at most "
        f"{MAX_BATCH_SIZE} records per batch, {TIMEOUT_S * 1e3:.0f} ms timeout, a cost given with each "
        f"record and never binding; ours: 3 priorities and {len(TENANTS)} tenants. One producer: submits "
        f"all, then awaits all ({MAX_QUEUE_SIZE:,} wait at most). Callers: each awaits its result before it "
        "sends the next."
    )
    return Table(setting if flyte else f"{setting} {NO_FLYTE}.", rows)
