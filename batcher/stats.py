"""Statistics: a batcher's counts, their frozen snapshot, and observations of single records."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from batcher.entries import Entry

Outcome = Literal["completed", "failed", "cancelled"]

RECENT = 512  # records over which percentiles are taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of both batchers. The README of this package says what each of them is, and its unit."""

    total_submitted: int = 0
    total_completed: int = 0
    total_failed: int = 0
    total_cancelled: int = 0
    total_expired: int = 0
    total_rejected: int = 0
    queue_depth: int = 0
    queue_cost: int = 0
    queue_classes: dict[int, tuple[int, int]] = field(default_factory=dict)
    outside: int = 0
    running: int = 0
    running_cost: int = 0
    busy_time_s: float = 0.0
    idle_time_s: float = 0.0
    utilization: float = field(init=False, default=0.0)
    throughput: float = 0.0
    cost_throughput: float = 0.0
    avg_latency_s: float = 0.0
    avg_run_s: float = 0.0
    wait_p50_s: float = 0.0
    wait_p90_s: float = 0.0
    wait_p99_s: float = 0.0
    run_p50_s: float = 0.0
    run_p90_s: float = 0.0
    run_p99_s: float = 0.0

    def __post_init__(self) -> None:
        elapsed = self.busy_time_s + self.idle_time_s
        object.__setattr__(self, "utilization", self.busy_time_s / elapsed if elapsed else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats(Stats):
    """Statistics of a `DynamicBatcher`: the statistics of any batcher, and of its batches."""

    total_batches: int = 0
    total_batch_cost: int = 0
    total_padded_cost: int = 0
    avg_batch_size: float = 0.0
    avg_batch_cost: float = 0.0
    padding_ratio: float = 0.0


class Load(NamedTuple):
    """The load of a `ContinuousBatcher`: a few numbers that cost less than its `stats`."""

    running: int  # records that run
    waiting: int  # records that wait, for space in the queue too
    cost: int  # the cost of those that wait
    priority: int  # the most urgent tier of them; 0 if none wait
    deadline: float | None  # the earliest of their deadlines, on the batcher's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousStats(Stats):
    """Statistics of a `ContinuousBatcher`: the statistics of any batcher, and of its window."""

    outside_cost: int = 0
    capacity: int = 0
    max_running: int | None = None
    occupancy: float = 0.0
    correction: float = 1.0
    output_tokens: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    background_running: int = 0
    background_cost: int = 0
    total_promoted: int = 0
    caution: float = 0.0


def percentiles(samples: Iterable[float], points: Sequence[float]) -> list[float]:
    """Return the percentiles at these points, 0 to 1, by nearest rank; zeros if there are no samples."""
    ranked = sorted(samples) or [0.0]
    return [ranked[min(int(point * len(ranked)), len(ranked) - 1)] for point in points]


def _named(name: str, times: Iterable[float], points: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, float]:
    found = zip(points, percentiles(times, points), strict=True)
    return {f"{name}_p{point * 100:.0f}_s": value for point, value in found}


class Observation(NamedTuple):
    """One record that ran."""

    tenant: str
    priority: int
    cost: int  # what its tenant was charged for: prompt and output where they are known, else its cost
    wait_s: float  # seconds from submission to start
    run_s: float  # seconds from start to end
    outcome: Outcome


class BatchObservation(NamedTuple):
    """One batch that was given to `process_fn`: its records and their cost."""

    size: int
    cost: int


class Observations(NamedTuple):
    """Observations of the latest records, and of the latest batches; the oldest give way to new ones."""

    records: deque[Observation]
    batches: deque[BatchObservation]


@dataclass(eq=False)
class Recorder:
    """The counts of a running batcher, as plain attributes with the names in `Stats`."""

    total_completed: int = 0
    total_failed: int = 0
    total_cancelled: int = 0
    total_expired: int = 0
    total_rejected: int = 0
    completed_cost: int = 0
    latency_s: float = 0.0
    output_tokens: int = 0
    batches: int = 0
    batch_records: int = 0
    batch_cost: int = 0
    padded_cost: int = 0
    observations: Observations | None = None
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _ran: int = 0
    _run_s: float = 0.0
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _runs: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    # The kind of time and the share in use now, and their sums up to `_since`; `_times` is idle and busy.
    _busy: bool = False
    _share: float = 0.0
    _times: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _filled_s: float = 0.0
    _since: float | None = None

    def ran(self, records: int, waits_s: Sequence[float], run_s: float) -> None:
        """Count records that ran for `run_s` after these waits; none: they run again, and count then."""
        self._ran += records
        self._run_s += records * run_s
        self._waits += waits_s
        self._runs += [run_s] * len(waits_s)

    def unserved(self, entry: Entry[Any], *, late: bool = False) -> None:
        """Count an entry that has left the queue otherwise than to run."""
        if not entry.admitted:
            self.total_rejected += entry.records
        elif late:
            self.total_expired += entry.records
        else:
            self.total_failed += entry.records

    def open(self, now: float) -> None:
        """Time counts from now on."""
        self._since = now

    def close(self, now: float) -> None:
        """Time no longer counts."""
        self._advance(now)
        self._since = None

    def switch(self, busy: bool, now: float, share: float = 0.0) -> None:
        """From now on the time counts as busy, or as idle, and this share of the capacity is in use."""
        self._advance(now)
        self._busy = busy
        self._share = share

    def _advance(self, now: float) -> None:
        if self._since is not None:
            self._times[self._busy] += now - self._since
            self._filled_s += self._share * (now - self._since)
            self._since = now

    def window(self, now: float) -> dict[str, float]:
        """Return the fields of `ContinuousStats` that follow from the counts."""
        self._advance(now)
        ttfts = _named("ttft", self.ttfts_s, (0.5, 0.99)) if self.ttfts_s else {}
        occupancy = self._filled_s / (sum(self._times) or 1.0)
        return {"occupancy": occupancy, "output_tokens": self.output_tokens, **ttfts}

    def common(self, now: float) -> dict[str, float]:
        """Return the fields of `Stats` that follow from the counts."""
        self._advance(now)
        idle, busy = self._times
        elapsed = idle + busy or 1.0
        return {
            **{name: value for name, value in vars(self).items() if name.startswith("total_")},
            **_named("wait", self._waits),
            **_named("run", self._runs),
            "busy_time_s": busy,
            "idle_time_s": idle,
            "throughput": self.total_completed / elapsed,
            "cost_throughput": self.completed_cost / elapsed,
            "avg_latency_s": self.latency_s / (self.total_completed or 1),
            "avg_run_s": self._run_s / (self._ran or 1),
        }
