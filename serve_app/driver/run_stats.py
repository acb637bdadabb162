"""What a run counts."""

import random
import resource
import time
from collections import Counter
from dataclasses import dataclass, field

from serve_app.api.protocol import JSON

SAMPLE = 10_000
"""Calls over which latency percentiles are taken; of more calls, as many drawn evenly."""


@dataclass(slots=True)
class Totals:
    """What rows add up to.

    Attributes:
        rows: Rows.
        failed: Those without a result, by the type of their error.
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens of the results.
    """

    rows: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, row: JSON) -> None:
        """Count a row of the output."""
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
    """How busy the batchers were during the run, from what `/stats` says of each replica.

    Attributes:
        running: Records that run now, over all replicas.
        waiting: Records that wait now.
        replicas: Replicas that answer now.
    """

    running: int = 0
    waiting: int = 0
    replicas: int = 0
    _first: dict[str, tuple[float, float]] = field(default_factory=dict)
    _last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def see(self, replicas: list[JSON]) -> None:
        """Take in a report of all replicas."""
        self.replicas = len(replicas)
        self.running = sum(replica["batcher"].get("running", 0) for replica in replicas)
        self.waiting = sum(replica["batcher"].get("queue_depth", 0) for replica in replicas)
        for replica in replicas:
            times = (replica["batcher"]["busy_time_s"], replica["batcher"]["idle_time_s"])
            self._first.setdefault(replica["replica"], times)
            self._last[replica["replica"]] = times

    @property
    def share(self) -> float | None:
        """Share of the replicas' time, 0 to 1, in which a record ran; None while it isn't known."""
        busy = sum(self._last[name][0] - first[0] for name, first in self._first.items())
        idle = sum(self._last[name][1] - first[1] for name, first in self._first.items())
        return busy / (busy + idle) if busy + idle > 0 else None


class Latencies:
    """A sample of latencies that doesn't grow with the run."""

    def __init__(self) -> None:
        self._sample: list[float] = []
        self._seen = 0
        self._random = random.Random(0)

    def add(self, seconds: float) -> None:
        """Take in a latency."""
        self._seen += 1
        if len(self._sample) < SAMPLE:
            self._sample.append(seconds)
        elif (at := self._random.randrange(self._seen)) < SAMPLE:
            self._sample[at] = seconds

    def percentiles(self) -> dict[str, float | None]:
        """Return the median, the 90th and the 99th percentile, in seconds."""
        ordered = sorted(self._sample)
        return {
            name: round(ordered[int(share * (len(ordered) - 1))], 4) if ordered else None
            for name, share in (("p50_s", 0.5), ("p90_s", 0.9), ("p99_s", 0.99))
        }


class RunStats:
    """What one run counts, from its start.

    Attributes:
        totals: The rows that this run has done.
        utilization: How busy the service is.
        latencies: Of the calls that were answered.
        calls: Calls that were answered.
        retries: Calls that were sent again.
        in_flight: Calls under way.
        trouble: Why the last retry was necessary.
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
        """Stop the clock: the last result has come."""
        self._ended = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the last result, or until now."""
        return (self._ended or time.monotonic()) - self._started

    @property
    def rows_per_s(self) -> float:
        """Rows done per second since the start."""
        return self.totals.rows / max(self.elapsed_s, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """Tokens read and written per second since the start."""
        tokens = self.totals.prompt_tokens + self.totals.completion_tokens
        return tokens / max(self.elapsed_s, 1e-9)

    def body(self) -> JSON:
        """Return all of it as JSON."""
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
