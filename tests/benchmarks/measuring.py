"""Measuring on a machine that others use too: CPU time, interleaved runs, medians."""

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Sample = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Options:
    """How thoroughly to measure.

    Attributes:
        pairs: Rounds; in each, everything that is compared runs once, next to each other.
        records: Records in one run of what is measured per record.
        quick: Leave the largest sizes out.
    """

    pairs: int
    records: int
    quick: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        what: What was measured.
        unit: Of the samples; "x" for a ratio.
        samples: One per round.
        at_most: What the median must not exceed; None: no target.
        at_least: What the median must reach; None: no target.
    """

    what: str
    unit: str
    samples: Sequence[float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        """The middle of the samples."""
        return statistics.median(self.samples)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None: there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.median <= self.at_most) and (
            self.at_least is None or self.median >= self.at_least
        )


@dataclass(frozen=True, slots=True)
class Table:
    """What one benchmark found.

    Attributes:
        setting: What was run, in a sentence or two: all that is needed to judge the numbers.
        rows: The numbers.
    """

    setting: str
    rows: Sequence[Row]


def progress(text: str) -> None:
    """Show what is going on, on one line of the terminal; line by line where it is none."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def interleave(
    title: str, samples: Mapping[str, Sample], pairs: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Take samples round by round, each round in another order, so that drift hits all alike.

    Args:
        title: For the progress.
        samples: What to measure, by name; each call returns one sample.
        pairs: Rounds.
        warm_up: Whether to throw a first round away.
    """
    found: dict[str, list[float]] = {name: [] for name in samples}
    names = list(samples)
    for number in range(0 if warm_up else 1, pairs + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            progress(f"{title}: {f'round {number} of {pairs}' if number else 'warming up'}, {name}")
            value = samples[name]()
            if number:
                found[name].append(value)
    progress("")
    return found


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each pair of samples that were taken in the same round."""
    return [one / other for one, other in zip(above, below, strict=True)]


@contextmanager
def clean_heap() -> Iterator[None]:
    """Keep what exists already out of the garbage collector, which would walk it again and again.

    Large imports would otherwise be paid for by whatever is measured after them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def cpu_us_per_record(run: Callable[[int], Coroutine[Any, Any, None]], records: int) -> Sample:
    """Return a sample of the CPU time of `run(records)`, in microseconds per record, on a fresh loop."""

    async def timed() -> float:
        started = time.process_time()
        await run(records)
        return (time.process_time() - started) / records * 1e6

    def sample() -> float:
        with clean_heap():
            return asyncio.run(timed())

    return sample
