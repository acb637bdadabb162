"""Measurements on a machine under other load too: CPU time, interleaved rounds, medians."""

import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Sample = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Options:
    """Size of a measurement.

    Attributes:
        rounds: Rounds; each runs all that is compared once, one after the other.
        records: Records in a run that is measured per record.
        quick: Whether to leave the largest sizes out.
    """

    rounds: int
    records: int
    quick: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        what: Name of the quantity.
        unit: Unit of the samples; "x" for a ratio.
        samples: Measured values, one per round.
        at_most: Upper bound of the median; None: no target.
        at_least: Lower bound of the median; None: no target.
    """

    what: str
    unit: str
    samples: Sequence[float]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the samples."""
        if len(self.samples) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    @property
    def met(self) -> bool | None:
        """True if the target is met; None if there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.median <= self.at_most) and (
            self.at_least is None or self.median >= self.at_least
        )


@dataclass(frozen=True, slots=True)
class Table:
    """The result of one benchmark.

    Attributes:
        setting: Description of the measurement, in a sentence or two, as needed to judge the numbers.
        rows: The numbers.
    """

    setting: str
    rows: Sequence[Row]


def go_first() -> None:
    """Let this process run before others, as a client does that has a machine of its own.

    On Linux processes share the cores by session, and a server's session has several processes: without this
    a client on two full cores waits up to a second for its turn, which would count as the server's. It takes
    root; without it, nothing changes. Servers run in sessions of their own.
    """
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15")


def progress(text: str) -> None:
    """Show the progress: in place on a terminal, else line by line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def interleave(
    title: str, samples: Mapping[str, Sample], rounds: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Take samples round by round, each round in another order, so that drift affects all alike.

    Args:
        title: Title of the progress.
        samples: Measurements by name; each call returns one sample.
        rounds: Rounds.
        warm_up: Whether to run a first round whose samples don't count.
    """
    found: dict[str, list[float]] = {name: [] for name in samples}
    names = list(samples)
    for number in range(0 if warm_up else 1, rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            progress(f"{title}: {f'round {number} of {rounds}' if number else 'warming up'}, {name}")
            value = samples[name]()
            if number:
                found[name].append(value)
    progress("")
    return found


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratios of samples of the same round."""
    return [one / other for one, other in zip(above, below, strict=True)]


@contextmanager
def clean_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would slow down the measured code."""
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
