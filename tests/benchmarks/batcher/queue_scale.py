"""CPU time of the queue per record, by the number of waiting records."""

import itertools
import random
import time
from typing import Any

from batcher import Entry, RequestQueue
from tests.benchmarks.measuring import Options, Row, Sample, Table, clean_heap, interleave, ratios
from tests.fakes.clock import Clock

DEPTHS = (1_000, 10_000, 100_000, 1_000_000)
TENANTS = (1, 100, 10_000)
PORTION = 64
GROWTH = 3.0
"""Bound on growth: log(10^6) is twice log(10^3), and a heap outside the processor's cache adds the rest."""


def _entries(count: int, tenants: int, deadlines: bool) -> list[Entry[Any]]:
    draw = random.Random(1)
    names = [f"tenant-{number}" for number in range(tenants)]
    return [
        Entry(
            None,
            1 + int(draw.random() * 1000),
            number % 3,
            names[int(draw.random() * tenants)],
            1e9 + draw.random() if deadlines else None,
        )
        for number in range(count)
    ]


def churn(depth: int, tenants: int, records: int, deadlines: bool = False) -> Sample:
    """Return a sample of the CPU time, in µs, to add a record to a queue of a depth and take it."""

    def sample() -> float:
        clock = Clock()
        queue: RequestQueue[Entry[Any]] = RequestQueue(clock=clock)
        for entry in _entries(depth, tenants, deadlines):
            queue.add(entry)
        fresh = iter(_entries(records, tenants, deadlines))
        taken = 0
        with clean_heap():
            started = time.process_time()
            while taken < records:
                clock.now += 0.01
                taken += len(queue.take(max_records=PORTION))
                for entry in itertools.islice(fresh, PORTION):
                    queue.add(entry)
            return (time.process_time() - started) / taken * 1e6

    return sample


def cancel(depth: int, tenants: int) -> Sample:
    """Return a sample of the CPU time, in µs, to cancel a record; all are cancelled, in random order."""

    def sample() -> float:
        queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock())
        entries = _entries(depth, tenants, True)
        for entry in entries:
            queue.add(entry)
        random.Random(2).shuffle(entries)
        with clean_heap():
            started = time.process_time()
            for entry in entries:
                queue.remove(entry)
            return (time.process_time() - started) / depth * 1e6

    return sample


def measure(options: Options) -> Table:
    """Return the table of µs per record by depth and tenants, and of its growth."""
    depths = DEPTHS[:-1] if options.quick else DEPTHS
    rows = []
    for tenants in TENANTS:
        plural = f"{tenants:,} tenant{'s' if tenants > 1 else ''}"
        samples = {f"{depth:,} waiting": churn(depth, tenants, options.records) for depth in depths}
        found = interleave(f"queue, {plural}", samples, options.rounds, warm_up=False)
        rows += [Row(f"{plural}, {name}: add + take", "µs", found[name]) for name in found]
        first, *_, last = found.values()
        rows.append(
            Row(f"{plural}: growth, fewest to most waiting", "x", ratios(last, first), at_most=GROWTH),
        )
    middle = DEPTHS[-2]
    others = {
        "add + take, all with deadlines": churn(middle, 100, options.records, deadlines=True),
        "cancel, all with deadlines": cancel(middle, 100),
    }
    found = interleave("queue", others, options.rounds, warm_up=False)
    rows += [Row(f"100 tenants, {middle:,} waiting: {name}", "µs", found[name]) for name in found]
    setting = (
        f"CPU time per record that is added to, and taken from, a RequestQueue in which so many wait all the "
        f"time; {options.records:,} records in portions of {PORTION}, 3 priorities, costs of 1 to 1,000."
    )
    return Table(setting, rows)
