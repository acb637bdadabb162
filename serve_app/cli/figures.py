"""Figures of a service for `saturate top`, from its statistics at two times."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from batcher import ContinuousStats
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import tier
from serve_app.client import Client, ServiceError
from serve_app.stats import (
    BatchesStats,
    EngineTokens,
    ModelHealth,
    ModelStats,
    ReplicaStats,
    ServiceHealth,
    ServiceStats,
    Turn,
    Use,
)

OUTCOMES = ("completed", "failed", "cancelled", "expired", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a replica, or of all replicas of a model. None: unknown, or not applicable to the model.

    Counts and rates of a model are sums over its replicas. Its percentiles are the largest of its replicas.

    Attributes:
        running: Running requests; for a function, running records.
        max_running: Most requests that may run at once.
        waiting: Waiting requests.
        waiting_by_tier: Waiting requests by service tier; only tiers with waiting requests.
        kv_tokens: Tokens of KV cache that are reserved for the running requests and their answers.
        kv_capacity: Tokens of KV cache.
        kv_used: `kv_tokens` as a share of `kv_capacity`, 0 to 1.
        busy: Share of the time, 0 to 1, in which a request ran.
        requests_per_s: Completed requests per second.
        prompt_tokens_per_s: Tokens in, per second.
        output_tokens_per_s: Tokens out, per second.
        wait_p50_s: Seconds in the queue, median of the last 512 requests; `wait_p99_s`: 99th percentile.
        ttft_p50_s: Seconds from arrival in the replica to the first token, median of the last 512 streams;
            `ttft_p99_s`: 99th percentile.
        ttft_goal_s: Goal for the tiers above `flex`; None: no goal.
        completed: Completed requests since the start; `failed`, `cancelled`, `expired`, `rejected`: requests
            with these outcomes.
    """

    running: int | None = None
    max_running: int | None = None
    waiting: int | None = None
    waiting_by_tier: dict[str, int] = field(default_factory=dict)
    kv_tokens: int | None = None
    kv_capacity: int | None = None
    kv_used: float | None = None
    busy: float | None = None
    requests_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    wait_p50_s: float | None = None
    wait_p99_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_goal_s: float | None = None
    completed: int | None = None
    failed: int | None = None
    cancelled: int | None = None
    expired: int | None = None
    rejected: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica of a model.

    Attributes:
        replica: Id of the replica.
        statistics: Whether the replica has sent statistics.
        turn: Turn of a model that shares its device: group, state, turns, sleep_s, wake_s.
        figures: Figures of the replica.
    """

    replica: str
    statistics: bool
    turn: Turn | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """A LoRA adapter of a model.

    Attributes:
        id: The id that clients use.
        replicas: Replicas that serve the adapter.
        resident: Replicas with the adapter in a slot now.
    """

    id: str
    replicas: int
    resident: int


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model.

    Attributes:
        id: The id that clients use.
        state: "ready", "starting", "asleep" (scaled to zero, or until its turn), "failed" or "error".
        detail: The reason for a state other than "ready", if known.
        simulated: Profile of the simulated device; None: a real device.
        ready_replicas: Ready replicas as counted by Ray Serve; None: unknown.
        figures: Figures of all replicas together.
        replicas: Replicas that answered.
        adapters: LoRA adapters of the model.
    """

    id: str
    state: str
    detail: str
    simulated: str | None
    ready_replicas: int | None
    figures: Figures
    replicas: Sequence[ReplicaFigures]
    adapters: Sequence[AdapterFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFigures:
    """Usage of a tenant over all models, since their replicas started.

    Attributes:
        tenant: Name of the tenant; "other": all tenants without their own entry.
        calls: Ended calls.
        prompt_tokens: Tokens in, including `cached_tokens` from the prefix cache.
        output_tokens: Tokens out.
        cost: Cost of the records of functions.
        tokens_per_s: Tokens in and out, per second; None: not known yet.
    """

    tenant: str
    calls: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class View:
    """All figures on display.

    Attributes:
        url: Address of the service.
        time: Time of the statistics, in ISO 8601.
        interval_s: Seconds over which the rates are computed; None: no rates yet.
        models: The models that the caller may see.
        tenants: The tenants that the caller may see, in descending order of tokens.
        batches: The service's entry about `/v1/batches`; None: no batches.
    """

    url: str
    time: str
    interval_s: float | None
    models: Sequence[ModelFigures]
    tenants: Sequence[TenantFigures]
    batches: BatchesStats | None

    def body(self) -> JSON:
        """Return the figures as JSON."""
        found: JSON = TypeAdapter(View).dump_python(self, mode="json", exclude_unset=True)
        return found


SUMMED = (
    "running",
    "waiting",
    "kv_tokens",
    "kv_capacity",
    "requests_per_s",
    "prompt_tokens_per_s",
    "output_tokens_per_s",
    *OUTCOMES,
)
"""Figures that are summed over a model's replicas."""

LARGEST = ("wait_p50_s", "wait_p99_s", "ttft_p50_s", "ttft_p99_s", "ttft_goal_s")
"""Figures of a model that are the largest of its replicas."""

Entries = dict[str, ReplicaStats]
"""The replicas of a model in `/stats`, by id."""


@dataclass(frozen=True, slots=True)
class Poll:
    """The statistics of a service at one time.

    Attributes:
        at: Time of the answer, in seconds on the client's clock.
        time: Date and time of the answer.
        stats: The answer to `/stats`.
        health: The answer to `/health`; empty if it couldn't be read.
    """

    at: float
    time: datetime
    stats: ServiceStats
    health: ServiceHealth


def poll(client: Client, clock: Callable[[], float]) -> Poll:
    """Return the statistics of a service now.

    Raises:
        ServiceError: There is no service, it isn't saturate, or it refuses the key.
    """
    stats, health = client.stats(), ServiceHealth()
    # The picture is useful without the health.
    with suppress(ServiceError):
        health = client.health()
    return Poll(clock(), datetime.now(UTC), stats, health)


def view(url: str, now: Poll, before: Poll | None) -> View:
    """Return the figures of a service.

    Args:
        url: Address of the service.
        now: Current statistics.
        before: Earlier statistics, for rates; None: no rates.
    """
    seconds = now.at - before.at if before else 0.0
    growth = _Growth(seconds)
    then = before.stats.models if before and seconds > 0 else {}
    models, tenants = [], _Tenants(growth)
    for id, report in now.stats.models.items():
        entries = _entries(report)
        earlier = _entries(then[id]) if id in then else {}
        models.append(_model(id, report, now.health.model(id), entries, earlier, growth))
        tenants.add(entries, earlier)
    return View(
        url,
        now.time.isoformat(timespec="seconds"),
        round(seconds, 3) if seconds > 0 else None,
        models,
        tenants.sorted(),
        now.stats.batches,
    )


class _Growth:
    """Rates of counters, at least 0. A replica without earlier statistics has no rates.

    Args:
        seconds: Seconds between the two polls.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def per_s(
        self, entry: ReplicaStats, earlier: ReplicaStats | None, of: Callable[[ReplicaStats], float | None]
    ) -> float | None:
        """Return the growth per second of a replica's counter; None if unknown."""
        if earlier is None or self._seconds <= 0:
            return None
        last, first = of(entry), of(earlier)
        return None if last is None or first is None else max(0.0, (last - first) / self._seconds)


def _model(
    id: str, report: ModelStats, health: ModelHealth, entries: Entries, earlier: Entries, growth: _Growth
) -> ModelFigures:
    replicas = [_replica(name, entry, earlier.get(name), growth) for name, entry in entries.items()]
    error = report.error or ""
    state = _state(health, replicas, error)
    detail = error or ((health.awaits or "") if state == "starting" else "")
    if state == "failed":
        detail = next((one.turn.cause for one in replicas if one.turn and one.turn.cause), "")
    figures = _sum([one.figures for one in replicas])
    return ModelFigures(
        id, state, detail, health.simulated, health.replicas, figures, replicas, _adapters(entries.values())
    )


def _state(health: ModelHealth, replicas: Sequence[ReplicaFigures], error: str) -> str:
    if error and not replicas:
        return "error"
    if not replicas:
        # A model without replicas and without a known health is scaled to zero.
        return (health.state or "asleep") if health.state != "ready" else "starting"
    turns = {one.turn.state for one in replicas if one.turn}
    if any(one.turn is None for one in replicas) or turns & {"awake", "draining"}:
        return "ready"
    if turns & {"starting", "loading", "waking"}:
        return "starting"
    return "asleep" if "asleep" in turns else "failed"


def _replica(name: str, entry: ReplicaStats, earlier: ReplicaStats | None, growth: _Growth) -> ReplicaFigures:
    stats = entry.batcher
    if stats is None:
        return ReplicaFigures(name, False, entry.turn, Figures())
    window: JSON = {}
    if isinstance(stats, ContinuousStats):
        window = {
            "max_running": stats.max_running,
            "kv_tokens": stats.running_cost,
            "kv_capacity": stats.capacity,
            "kv_used": _share(stats.running_cost, stats.capacity),
            "ttft_p50_s": stats.ttft_p50_s,
            "ttft_p99_s": stats.ttft_p99_s,
        }
    busy = growth.per_s(entry, earlier, lambda one: one.batcher.busy_time_s if one.batcher else None)
    figures = Figures(
        running=stats.running,
        waiting=stats.queue_depth,
        waiting_by_tier=_by_tier(stats.queue_classes),
        busy=None if busy is None else min(1.0, busy),
        requests_per_s=growth.per_s(
            entry, earlier, lambda one: one.batcher.total_completed if one.batcher else None
        ),
        prompt_tokens_per_s=growth.per_s(entry, earlier, _prompt),
        output_tokens_per_s=growth.per_s(entry, earlier, _output),
        wait_p50_s=stats.wait_p50_s,
        wait_p99_s=stats.wait_p99_s,
        ttft_goal_s=entry.goals.ttft_p99_s if entry.goals else None,
        **{name: getattr(stats, f"total_{name}") for name in OUTCOMES},
        **window,
    )
    return ReplicaFigures(name, True, entry.turn, figures)


def _sum(parts: Sequence[Figures]) -> Figures:
    """Return the figures of several replicas together."""

    def known(name: str) -> list[Any]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    def added(name: str) -> Any:
        return sum(values) if (values := known(name)) else None

    tiers: dict[str, int] = {}
    for part in parts:
        for name, count in part.waiting_by_tier.items():
            tiers[name] = tiers.get(name, 0) + count
    busy = known("busy")
    # If a replica has no bound, the sum of the bounds is meaningless.
    bounded = all(part.max_running is not None for part in parts if part.running is not None)
    return Figures(
        **{name: added(name) for name in SUMMED},
        **{name: max(known(name), default=None) for name in LARGEST},
        max_running=added("max_running") if bounded else None,
        waiting_by_tier=tiers,
        kv_used=_share(added("kv_tokens"), added("kv_capacity")),
        busy=sum(busy) / len(busy) if busy else None,
    )


class _Tenants:
    """Sums of the usage of tenants over the replicas of all models."""

    def __init__(self, growth: _Growth) -> None:
        self._growth = growth
        self._sums: dict[str, dict[str, int]] = {}
        self._rates: dict[str, float] = {}

    def add(self, entries: Entries, earlier: Entries) -> None:
        """Add the replicas of a model."""
        for replica, entry in entries.items():
            before = earlier.get(replica)
            for name, use in _used(entry).items():
                sums = self._sums.setdefault(name, {})
                for kind in ("calls", "prompt", "cached", "output", "cost"):
                    sums[kind] = sums.get(kind, 0) + getattr(use, kind)
                rate = self._growth.per_s(entry, before, partial(_tokens, tenant=name))
                if rate is not None:
                    self._rates[name] = self._rates.get(name, 0.0) + rate

    def sorted(self) -> list[TenantFigures]:
        """Return the tenants in descending order of tokens per second, then of all tokens."""
        found = [
            TenantFigures(
                tenant=name,
                calls=sums["calls"],
                prompt_tokens=sums["prompt"],
                cached_tokens=sums["cached"],
                output_tokens=sums["output"],
                cost=sums["cost"],
                tokens_per_s=self._rates.get(name),
            )
            for name, sums in self._sums.items()
        ]
        return sorted(
            found,
            key=lambda one: (one.tokens_per_s or 0.0, one.prompt_tokens + one.output_tokens + one.cost),
            reverse=True,
        )


def _adapters(entries: Iterable[ReplicaStats]) -> list[AdapterFigures]:
    found: dict[str, AdapterFigures] = {}
    for entry in entries:
        for one in entry.adapters or ():
            if one is not None:
                known = found.get(one.id, AdapterFigures(one.id, 0, 0))
                found[one.id] = AdapterFigures(one.id, known.replicas + 1, known.resident + one.resident)
    return list(found.values())


def _entries(report: ModelStats) -> Entries:
    """Return the replicas of a model by id, or by position without an id."""
    return {entry.replica or str(place): entry for place, entry in enumerate(report.replicas)}


def _counted(entry: ReplicaStats) -> EngineTokens | None:
    return entry.usage.engine if entry.usage else None


def _prompt(entry: ReplicaStats) -> int | None:
    counted = _counted(entry)
    return counted.prompt if counted else None


def _output(entry: ReplicaStats) -> int | None:
    """Return the tokens out, counted by the engine per step, or else by ended requests."""
    if counted := _counted(entry):
        return counted.output
    return entry.window.output_tokens if entry.window else None


def _used(entry: ReplicaStats) -> dict[str, Use]:
    tenants = (entry.usage.tenants if entry.usage else None) or {}
    return {name: use for name, use in tenants.items() if use is not None}


def _tokens(entry: ReplicaStats, tenant: str) -> int | None:
    use = _used(entry).get(tenant)
    return None if use is None else use.prompt + use.output


def _by_tier(classes: dict[int, tuple[int, int]]) -> dict[str, int]:
    """Return the number of waiting records by tier name."""
    found: dict[str, int] = {}
    for priority, (records, _) in classes.items():
        # A priority of another version may have no name here.
        with suppress(LookupError, ValueError):
            if records:
                name = tier(priority)
                found[name] = found.get(name, 0) + records
    return found


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
