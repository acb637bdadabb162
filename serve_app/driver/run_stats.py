"""Statistics of a run."""

import random
import resource
import time
from collections import Counter
from dataclasses import dataclass, field

from batcher.stats import percentiles
from serve_app.api.protocol import JSON
from serve_app.jobs.pacing import EngineLoad, engine_load

IDLE = EngineLoad(0, 0)

SAMPLE = 10_000
"""Most latencies that are kept for percentiles, drawn uniformly from all calls."""


@dataclass(slots=True)
class Totals:
    """Totals of output rows.

    Attributes:
        rows: Number of rows.
        failed: Number of rows without a result, by type of error.
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens of the results.
    """

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, row: JSON) -> None:
        """Add an output row."""
        self.rows += 1
        if error := row["error"]:
            self.failed[error["type"]] += 1
        self.prompt_tokens += row["prompt_tokens"] or 0
        self.completion_tokens += row["completion_tokens"] or 0

    def body(self) -> JSON:
        """Return the totals as JSON."""
        return {
            "rows": self.rows,
            "with_result": self.rows - self.failed.total(),
            "failed": self.failed.total(),
            "failed_by_type": dict(self.failed),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


@dataclass(slots=True)
class Utilization:
    """Utilization of the model's batchers during a run, from the statistics of each replica.

    Attributes:
        load: Load of all replicas at the last update.
        replicas: Number of replicas, likewise.
    """

    load: EngineLoad = IDLE
    replicas: int = 0
    _first: dict[str, tuple[float, float]] = field(default_factory=dict)
    _last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def update(self, replicas: list[JSON]) -> None:
        """Add the statistics of all replicas at one time.

        Statistics of another form, as of another version, are left out: the run goes on without them.
        """
        try:
            load = engine_load(replicas)
            times = {
                replica["replica"]: tuple(
                    float(replica["batcher"][name]) for name in ("busy_time_s", "idle_time_s")
                )
                for replica in replicas
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        self.load, self.replicas = load, len(replicas)
        for name, (busy, idle) in times.items():
            self._first.setdefault(name, (busy, idle))
            self._last[name] = (busy, idle)

    @property
    def share(self) -> float | None:
        """Share of the replicas' time, 0 to 1, in which a record ran; None: unknown yet."""
        busy = sum(self._last[name][0] - first[0] for name, first in self._first.items())
        idle = sum(self._last[name][1] - first[1] for name, first in self._first.items())
        return busy / (busy + idle) if busy + idle > 0 else None


class Latencies:
    """A uniform sample of latencies, of bounded size."""

    def __init__(self) -> None:
        self._sample: list[float] = []
        self._seen = 0
        self._random = random.Random(0)

    def add(self, seconds: float) -> None:
        """Add a latency."""
        self._seen += 1
        if len(self._sample) < SAMPLE:
            self._sample.append(seconds)
        elif (at := self._random.randrange(self._seen)) < SAMPLE:
            self._sample[at] = seconds

    def percentiles(self) -> dict[str, float | None]:
        """Return the median, the 90th and the 99th percentile, in seconds."""
        names = ("p50_s", "p90_s", "p99_s")
        if not self._sample:
            return dict.fromkeys(names)
        found = percentiles(self._sample, (0.5, 0.9, 0.99))
        return {name: round(seconds, 4) for name, seconds in zip(names, found, strict=True)}


class RunStats:
    """Statistics of one run, from its start.

    Attributes:
        totals: Totals of the rows that this run has finished.
        utilization: Utilization of the service.
        latencies: Latencies of answered calls.
        calls: Number of answered calls.
        retries: Number of calls that were sent again.
        in_flight: Number of calls in flight.
        trouble: Message of the last failed call; empty once a call was answered.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.utilization = Utilization()
        self.latencies = Latencies()
        self.calls = 0
        self.retries = 0
        self.in_flight = 0
        self.trouble = ""
        self._started = time.monotonic()
        self._ended: float | None = None
        self._cpu = time.process_time()

    def end(self) -> None:
        """Stop the clock, after the last result."""
        self._ended = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the last result, or until now."""
        return (self._ended or time.monotonic()) - self._started

    @property
    def rows_per_s(self) -> float:
        """Finished rows per second since the start."""
        return self.totals.rows / max(self.elapsed_s, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per second since the start."""
        tokens = self.totals.prompt_tokens + self.totals.completion_tokens
        return tokens / max(self.elapsed_s, 1e-9)

    def body(self) -> JSON:
        """Return the statistics as JSON."""
        rows = self.totals.rows
        cpu = time.process_time() - self._cpu
        share = self.utilization.share
        return {
            **self.totals.body(),
            "elapsed_s": round(self.elapsed_s, 3),
            "rows_per_s": round(self.rows_per_s, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "calls": self.calls,
            "retries": self.retries,
            "call_latency": self.latencies.percentiles(),
            "utilization": None if share is None else round(share, 4),
            "driver": {
                "cpu_s": round(cpu, 3),
                "cpu_us_per_row": round(cpu / rows * 1e6, 1) if rows else None,
                "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            },
        }
