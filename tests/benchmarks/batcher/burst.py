"""Time to drain a burst: a batcher that closes small batches while the function is busy is slow."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from batcher import DynamicBatcher
from tests.benchmarks.batcher.rivals import NO_FLYTE, flyte_batcher, serve_batch
from tests.benchmarks.measuring import Options, Row, Sample, Table, interleave

RECORDS = 100
RATE = 200.0
BATCH_S = 0.3
LIMITS: dict[str, Any] = {"max_batch_size": 64, "batch_timeout_s": 0.02}


async def process(records: list[int]) -> list[int]:
    """Process a batch in constant time, as on a GPU with room to spare."""
    await asyncio.sleep(BATCH_S)
    return records


async def drain(call: Callable[[int], Awaitable[int]]) -> float:
    """Return the seconds from the first arrival to the last result."""
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def arrive(number: int) -> None:
        await asyncio.sleep(started + number / RATE - loop.time())
        await call(number)

    await asyncio.gather(*(arrive(number) for number in range(RECORDS)))
    return loop.time() - started


async def drain_submitting(batcher: Any) -> float:
    """Return the same for a batcher whose `submit` returns a future."""
    async with batcher:

        async def call(number: int) -> int:
            result: int = await (await batcher.submit(number, estimated_cost=1))
            return result

        return await drain(call)


async def _ours() -> float:
    return await drain_submitting(DynamicBatcher(process, **LIMITS))


async def _serve() -> float:
    return await drain(serve_batch(process, max_batch_size=64, batch_wait_timeout_s=0.02))


def measure(options: Options) -> Table:
    """Return the table of seconds by batcher."""
    samples: dict[str, Sample] = {
        "ours": lambda: asyncio.run(_ours()),
        "@serve.batch": lambda: asyncio.run(_serve()),
    }
    flyte = flyte_batcher()
    if flyte is not None:
        samples["flyte"] = lambda: asyncio.run(drain_submitting(flyte(process, **LIMITS)))
    found = interleave("burst", samples, options.rounds, warm_up=False)
    setting = (
        f"{RECORDS} records arrive at {RATE:.0f}/s, a batch takes {BATCH_S * 1e3:.0f} ms, 64 records at "
        "most, 20 ms timeout; seconds from the first arrival to the last result."
    )
    return Table(
        setting if flyte else f"{setting} {NO_FLYTE}.",
        [Row(name, "s", found[name], at_most=0.95 if name == "ours" else None) for name in found],
    )
