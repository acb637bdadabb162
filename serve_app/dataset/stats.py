"""Statistics of a run, as its calls and rows end."""

import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic_core import from_json

from batcher.stats import percentiles
from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.rows.pacing import EngineLoad, engine_load
from serve_app.rows.rows import Result, RowAnswer, RowRequest
from serve_app.rows.runner import Runner
from serve_app.stats import ReplicaStats

SAMPLE = 10_000
"""Most latencies that are kept for percentiles, drawn uniformly from all calls."""


PER_ROW = ("results", "details")
"""The fields of an answer that have a value for each row."""


class RowService(Protocol):
    """A service, as a run uses it."""

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a call and return its answer; see `RowClient`."""

    async def replicas(self) -> list[ReplicaStats] | None:
        """Return the statistics of the model's replicas; None if unavailable."""

    async def close(self) -> None:
        """Close the connections."""


@dataclass(slots=True)
class Utilization:
    """Utilization of the model's batchers during a run, from the statistics of each replica."""

    _first: dict[str, tuple[float, float]] = field(default_factory=dict)
    _last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def update(self, replicas: Sequence[ReplicaStats]) -> None:
        """Add the statistics of all replicas at one time."""
        for replica in replicas:
            if replica.batcher is None or replica.replica is None:
                continue
            times = replica.batcher.busy_time_s, replica.batcher.idle_time_s
            self._first.setdefault(replica.replica, times)
            self._last[replica.replica] = times

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
        rows: Rows that this run has finished.
        failed: Finished rows without a result, by type of error.
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens of the results.
        utilization: Utilization of the service.
        latencies: Latencies of answered calls.
        calls: Number of answered calls.
        in_flight: Number of calls in flight.
        retries: Tries beyond the first try of each row.
        trouble: Message of the last failed call; empty once a row was answered.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.failed: Counter[str] = Counter()
        self.prompt_tokens = self.completion_tokens = 0
        self.utilization = Utilization()
        self.latencies = Latencies()
        self.calls = self.in_flight = self.retries = 0
        self.trouble = ""
        self._started = time.monotonic()
        self._ended: float | None = None
        self._cpu = time.process_time()

    def add(self, results: Sequence[Result]) -> None:
        """Add rows of the output."""
        for result in results:
            self.rows += 1
            if result.is_error:
                self.failed[from_json(result.text)["error"]["type"]] += 1
            self.prompt_tokens += result.tokens.input_tokens
            self.completion_tokens += result.tokens.output_tokens

    def follow(self, runner: Runner) -> None:
        """Copy the counts of the runner."""
        self.retries, self.trouble = runner.retried, runner.trouble

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
        return self.rows / max(self.elapsed_s, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per second since the start."""
        return (self.prompt_tokens + self.completion_tokens) / max(self.elapsed_s, 1e-9)

    def body(self) -> JSON:
        """Return the statistics as JSON."""
        cpu = time.process_time() - self._cpu
        share = self.utilization.share
        failed = self.failed.total()
        return {
            "rows": self.rows,
            "with_result": self.rows - failed,
            "failed": failed,
            "failed_by_type": dict(self.failed),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "elapsed_s": round(self.elapsed_s, 3),
            "rows_per_s": round(self.rows_per_s, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "calls": self.calls,
            "retries": self.retries,
            "call_latency": self.latencies.percentiles(),
            "utilization": None if share is None else round(share, 4),
            "driver": {
                "cpu_s": round(cpu, 3),
                "cpu_us_per_row": round(cpu / self.rows * 1e6, 1) if self.rows else None,
                "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            },
        }


def split(answer: RowAnswer, rows: int) -> list[RowAnswer]:
    """Return the answer to each row of a call of `/generate`; 502 if the answer has another form."""
    if answer.status != 200:
        return [answer] * rows
    lists = [answer.body.get(name) for name in PER_ROW]
    if any(not isinstance(values, list) or len(values) != rows for values in lists):
        count = len(lists[0]) if isinstance(lists[0], list) else 0
        message = f"an answer with {count} results for {rows} prompts"
        return [RowAnswer.of(RequestError(502, "service_unavailable", message))] * rows
    errors: dict[int, JSON] = {error["index"]: error for error in answer.body.get("errors") or ()}
    return [
        RowAnswer(
            200,
            {"results": [result], "details": [detail]}
            | ({"errors": [errors[index]]} if index in errors else {}),
        )
        for index, (result, detail) in enumerate(zip(*lists, strict=True))
    ]


class Measured:
    """A service whose calls and replicas are measured.

    Args:
        service: The service.
        stats: Gets the measurements.

    Attributes:
        asleep: Whether the model has no replica, as of the last statistics.
    """

    def __init__(self, service: RowService, stats: RunStats) -> None:
        self.asleep = False
        self._service = service
        self._stats = stats

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a call and return its answer."""
        started = time.monotonic()
        self._stats.in_flight += 1
        try:
            answer = await self._service.send(request)
        finally:
            self._stats.in_flight -= 1
        if answer.status == 200:
            self._stats.calls += 1
            self._stats.latencies.add(time.monotonic() - started)
        return split(answer, 1)[0]

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return the load of the engines, and note their utilization; None: unknown."""
        replicas = await self._service.replicas()
        if replicas is None:
            return None
        self.asleep = not replicas
        self._stats.utilization.update(replicas)
        return engine_load(replicas)
