"""Reads the figures of a service from its statistics at two times."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import tier
from serve_app.cli.figures import OUTCOMES, Adapter, Figures, Model, Replica, Tenant, View
from serve_app.cli.stats_client import Poll

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
"""Figures of which a model has the sum of its replicas."""

LARGEST = ("wait_p50_s", "wait_p99_s", "ttft_p50_s", "ttft_p99_s", "ttft_goal_s")
"""Figures of which a model has the largest."""

Entries = dict[str, JSON]
"""The entries of a model's replicas in `/stats`, by replica."""


def view(url: str, now: Poll, before: Poll | None) -> View:
    """Return the figures of a service.

    Args:
        url: Its address.
        now: Its statistics.
        before: Its statistics some time ago, for rates; None: there are no rates.
    """
    seconds = now.at - before.at if before else 0.0
    growth = _Growth(seconds)
    then = before.stats["models"] if before and seconds > 0 else {}
    health = now.health.get("models", {})
    models, tenants = [], _Tenants(growth)
    for id, report in now.stats["models"].items():
        entries, earlier = _entries(report), _entries(then.get(id, {}))
        models.append(_model(id, report, mapping(health.get(id)), entries, earlier, growth))
        tenants.add(entries, earlier)
    batches = now.stats.get("batches")
    return View(
        url,
        now.time.isoformat(timespec="seconds"),
        round(seconds, 3) if seconds > 0 else None,
        models,
        tenants.sorted(),
        batches if isinstance(batches, dict) else None,
    )


class _Growth:
    """Rates of counters. A replica that has only just come has none, and a counter never runs backwards.

    Args:
        seconds: Time between the two polls.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def per_s(self, entry: JSON, earlier: JSON | None, of: Callable[[JSON], Any]) -> float | None:
        """Return the growth per second of a counter of a replica; None: it can't be known."""
        if earlier is None or self._seconds <= 0:
            return None
        last, first = number(of(entry)), number(of(earlier))
        return None if last is None or first is None else max(0.0, (last - first) / self._seconds)


def _model(id: str, report: JSON, health: JSON, entries: Entries, earlier: Entries, growth: _Growth) -> Model:
    replicas = [_replica(name, entry, earlier.get(name), growth) for name, entry in entries.items()]
    error = str(report["error"]) if report.get("error") else ""
    state = _state(health, replicas, error)
    detail = error or (str(health.get("awaits") or "") if state == "starting" else "")
    if state == "failed":
        detail = next((str(one.turn["cause"]) for one in replicas if one.turn and one.turn.get("cause")), "")
    simulated = health.get("simulated")
    ready = health.get("replicas")
    return Model(
        id,
        state,
        detail,
        simulated if isinstance(simulated, str) else None,
        ready if isinstance(ready, int) else None,
        _sum([one.figures for one in replicas]),
        replicas,
        _adapters(entries.values()),
    )


def _state(health: JSON, replicas: Sequence[Replica], error: str) -> str:
    if error and not replicas:
        return "error"
    if not replicas:
        # Without a word about its health, a model without replicas is one that is scaled to zero.
        return str(health.get("state", "asleep")) if health.get("state") != "ready" else "starting"
    turns = {str(one.turn.get("state")) for one in replicas if one.turn}
    if len([one for one in replicas if one.turn]) < len(replicas) or turns & {"awake", "draining"}:
        return "ready"
    return (
        "starting"
        if turns & {"starting", "loading", "waking"}
        else "asleep"
        if "asleep" in turns
        else "failed"
    )


def _replica(name: str, entry: JSON, earlier: JSON | None, growth: _Growth) -> Replica:
    stats, turn = entry.get("batcher"), entry.get("turn")
    turn = turn if isinstance(turn, dict) else None
    if not isinstance(stats, dict):
        return Replica(name, False, turn, Figures())
    kv, capacity = number(stats.get("running_cost")), number(stats.get("capacity"))
    of_llm = capacity is not None
    busy = growth.per_s(entry, earlier, _of("batcher", "busy_time_s"))
    figures = Figures(
        running=number(stats.get("running")),
        max_running=number(stats.get("max_running")),
        waiting=number(stats.get("queue_depth")),
        waiting_by_tier=_by_tier(stats.get("queue_classes")),
        kv_tokens=kv if of_llm else None,
        kv_capacity=capacity,
        kv_used=_share(kv, capacity),
        busy=None if busy is None else min(1.0, busy),
        requests_per_s=growth.per_s(entry, earlier, _of("batcher", "total_completed")),
        prompt_tokens_per_s=growth.per_s(entry, earlier, _of("usage", "engine", "prompt")),
        output_tokens_per_s=growth.per_s(entry, earlier, _output),
        **{
            name: number(stats.get(name)) for name in ("wait_p50_s", "wait_p99_s", "ttft_p50_s", "ttft_p99_s")
        },
        ttft_goal_s=number(_of("goals", "ttft_p99_s")(entry)),
        **{name: number(stats.get(f"total_{name}")) for name in OUTCOMES},
    )
    return Replica(name, True, turn, figures)


def _sum(parts: Sequence[Figures]) -> Figures:
    """Return the figures of several replicas together."""

    def added(name: str) -> Any:
        known = [value for part in parts if (value := getattr(part, name)) is not None]
        return sum(known) if known else None

    def largest(name: str) -> Any:
        return max((value for part in parts if (value := getattr(part, name)) is not None), default=None)

    tiers: dict[str, int] = {}
    for part in parts:
        for name, count in part.waiting_by_tier.items():
            tiers[name] = tiers.get(name, 0) + count
    known = [part.busy for part in parts if part.busy is not None]
    # A replica without a bound makes the sum of the bounds meaningless.
    bounded = all(part.max_running is not None for part in parts if part.running is not None)
    return Figures(
        **{name: added(name) for name in SUMMED},
        **{name: largest(name) for name in LARGEST},
        max_running=added("max_running") if bounded else None,
        waiting_by_tier=tiers,
        kv_used=_share(added("kv_tokens"), added("kv_capacity")),
        busy=sum(known) / len(known) if known else None,
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
            for name, used in _used(entry).items():
                sums = self._sums.setdefault(name, {})
                for kind in ("calls", "prompt", "cached", "output", "cost"):
                    sums[kind] = sums.get(kind, 0) + (number(used.get(kind)) or 0)
                for kind in ("prompt", "output"):
                    rate = self._growth.per_s(entry, before, _of("usage", "tenants", name, kind))
                    if rate is not None:
                        self._rates[name] = self._rates.get(name, 0.0) + rate

    def sorted(self) -> list[Tenant]:
        """Return the tenants, those with the most tokens per second and in all first."""
        found = [
            Tenant(
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


def _adapters(entries: Iterable[JSON]) -> list[Adapter]:
    found: dict[str, Adapter] = {}
    for entry in entries:
        listed = entry.get("adapters")
        for one in listed if isinstance(listed, list) else ():
            if not isinstance(one, dict) or "id" not in one:
                continue
            id = str(one["id"])
            known = found.get(id, Adapter(id, False, 0, 0))
            found[id] = Adapter(
                id,
                known.pinned or bool(one.get("pinned")),
                known.replicas + 1,
                known.resident + bool(one.get("resident")),
            )
    return list(found.values())


def _entries(report: JSON) -> Entries:
    """Return the replicas of a model's report; one without an id is known by its place."""
    listed = report.get("replicas", ())
    return {
        str(entry.get("replica") or place): entry
        for place, entry in enumerate(listed)
        if isinstance(entry, dict)
    }


def _of(*path: str) -> Callable[[JSON], Any]:
    """Return what reads a value of a replica's entry by its path."""

    def read(entry: JSON) -> Any:
        found: Any = entry
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    return read


_counted = _of("usage", "engine", "output")
_reported = _of("batcher", "output_tokens")
_tenants = _of("usage", "tenants")


def _output(entry: JSON) -> Any:
    """Return the tokens out: as the engine counts them by step, or else as requests that ended had them."""
    counted = _counted(entry)
    return _reported(entry) if counted is None else counted


def _used(entry: JSON) -> dict[str, JSON]:
    found = _tenants(entry)
    return (
        {name: used for name, used in found.items() if isinstance(used, dict)}
        if isinstance(found, dict)
        else {}
    )


def _by_tier(classes: Any) -> dict[str, int]:
    """Return the waiting records by the name of their tier."""
    found: dict[str, int] = {}
    if isinstance(classes, dict):
        for priority, waiting in classes.items():
            # In JSON the keys are text.
            with suppress(ValueError, TypeError, LookupError):
                if records := number(waiting[0]):
                    name = tier(int(priority))
                    found[name] = found.get(name, 0) + records
    return found


def mapping(value: Any) -> JSON:
    """Return a mapping as it is; an empty one for everything else."""
    return value if isinstance(value, dict) else {}


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def number(value: Any) -> Any:
    """Return a number as it is; None for everything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None
