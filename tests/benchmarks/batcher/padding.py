"""Share of padding in padded batches, by the way of forming batches."""

import asyncio
import itertools
import math
import random
from collections.abc import Iterable

from batcher import DynamicBatcher
from batcher.forming import Forming
from tests.benchmarks.measuring import Options, Row, Table, progress

RECORDS = 20_000
MEDIAN, SIGMA, LONGEST = 128, 0.9, 4_096
MAX_BATCH_SIZE = 64
BUDGET = 32_000
WAYS: tuple[Forming, ...] = ("arrival", "bucketed", "sorted")


def lengths(seed: int) -> list[int]:
    """Return lognormal lengths in tokens."""
    draw = random.Random(seed)
    return [max(1, min(LONGEST, round(draw.lognormvariate(math.log(MEDIAN), SIGMA)))) for _ in range(RECORDS)]


def padded(batches: Iterable[list[int]]) -> int:
    """Return the tokens of batches in which every record is as long as the longest."""
    return sum(max(batch) * len(batch) for batch in batches)


def offline(records: list[int]) -> list[list[int]]:
    """Return the batches with all records known in advance: sorted, then cut."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for length in sorted(records, reverse=True):
        if len(batch) == MAX_BATCH_SIZE or (batch and batch[0] * (len(batch) + 1) > BUDGET):
            batches.append(batch)
            batch = []
        batch.append(length)
    return [*batches, batch]


async def online(records: list[int], forming: Forming) -> list[list[int]]:
    """Return the batches that the batcher forms while records wait in its queue."""
    batches: list[list[int]] = []

    async def process(batch: list[int]) -> list[int]:
        batches.append(batch)
        await asyncio.sleep(0)
        return batch

    async with DynamicBatcher(
        process,
        cost_estimator=int,
        target_batch_cost=BUDGET,
        max_batch_size=MAX_BATCH_SIZE,
        forming=forming,
        padded=True,
    ) as batcher:
        for future in [await batcher.submit(record) for record in records]:
            await future
    return batches


def measure(options: Options) -> Table:
    """Return the table of tokens and batches of each way, relative to offline sorting."""
    found: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        found.setdefault(what, []).append(value)

    for seed in range(options.rounds):
        progress(f"padding: round {seed + 1} of {options.rounds}")
        records = lengths(seed)
        best = offline(records)
        for way in WAYS:
            batches = asyncio.run(online(records, way))
            assert sorted(itertools.chain(*batches)) == sorted(records)
            note(f"padded tokens, {way}", padded(batches) / padded(best))
            note(f"batches, {way}", len(batches) / len(best))
        note("tokens without any padding", sum(records) / padded(best))
    progress("")
    limits = {"padded tokens, bucketed": 1.15, "padded tokens, sorted": 1.15}
    setting = (
        f"{RECORDS:,} lognormal lengths (median {MEDIAN}, sigma {SIGMA}, at most {LONGEST:,} tokens), at "
        f"most {MAX_BATCH_SIZE} records and {BUDGET:,} padded tokens per batch, default queue and "
        "look-ahead; relative to sorting everything offline."
    )
    return Table(setting, [Row(what, "x", found[what], at_most=limits.get(what)) for what in sorted(found)])
