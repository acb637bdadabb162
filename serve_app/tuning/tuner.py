"""The search for the highest load that holds the goals, the settings for it, and both in words."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.system.tables import duration, text_table
from serve_app.system.yaml_text import dump
from serve_app.tuning.goals import Goal, batcher_goals
from serve_app.tuning.load import Axis, LoadPoint, shown

RESOLUTION = 0.1
"""Distance at which a search ends: from the load that holds to the load that breaks, as a share of the
latter."""

MOST_POINTS = 24
"""Most loads of a search."""

MOST_CLIENTS = 4_096
"""Most clients; each has a connection."""

MARGIN = 0.9
"""Requests in flight at which autoscaling adds a replica, as a share of the number at the highest load."""

QUEUE_MARGIN, LEAST_QUEUE = 1.5, 8
"""Requests that may wait, as a multiple of the requests that start within the time to the first token."""

Measure = Callable[[float], Awaitable[LoadPoint]]


async def search(measure: Measure, goals: Sequence[Goal], *, held: float = 0.0, whole: bool) -> None:
    """Measure loads until the highest load that holds the goals is known.

    The load is doubled until it breaks a goal. Each further load is halfway between the highest load that
    holds and the lowest load that breaks.

    Args:
        measure: Measures a load.
        goals: The goals.
        held: A load that holds, from which the search starts; 0: none is known, and the first load is 1.
        whole: Whether loads are whole numbers: clients.
    """
    low, high, load = held, math.inf, 2 * held or 1.0
    for _ in range(MOST_POINTS):
        if (await measure(load)).misses(goals):
            high = load
        else:
            low = load
        if high == math.inf:
            load = 2 * low
            if whole and load > MOST_CLIENTS:
                return
        elif high - low <= max(RESOLUTION * high, 1.0 * whole):
            return
        else:
            load = (low + high) / 2
            load = float(int(load)) if whole else load


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """Settings for the highest load.

    Attributes:
        max_queue_size: `batcher.max_queue_size`; None: no goal bounds the wait.
        target_ongoing_requests: The same in `autoscaling_config`: requests in flight per replica.
        goals: `batcher.goals`; empty: no goal is for the p99 of the first token or of the pace.
    """

    max_queue_size: int | None
    target_ongoing_requests: int
    goals: dict[str, float]

    @property
    def batcher(self) -> dict[str, Any]:
        """The settings under `batcher`."""
        queue = {} if self.max_queue_size is None else {"max_queue_size": self.max_queue_size}
        return queue | ({"goals": dict(self.goals)} if self.goals else {})


def choose(point: LoadPoint, goals: Sequence[Goal], replicas: int) -> TunedSettings:
    """Return the settings for a load that holds.

    The queue has room for the requests that can start before their first token would be late. Further
    requests get a 429 at once.

    Args:
        point: The load.
        goals: The goals.
        replicas: Replicas that took the load.
    """
    life = point.in_flight / point.rate
    waits = [goal.bound - life * (goal.metric == "latency") for goal in goals if goal.metric != "tpot"]
    queue = None
    if waits:
        started = max(0.0, min(waits)) * point.rate / replicas
        queue = max(LEAST_QUEUE, math.ceil(QUEUE_MARGIN * started))
    target = max(1, math.floor(MARGIN * point.in_flight / replicas))
    return TunedSettings(queue, target, batcher_goals(goals))


@dataclass(slots=True)
class Tuning:
    """The result of a tuning, complete or not.

    Attributes:
        model: The model.
        requests: The requests, in words.
        goals: The goals.
        over: The load that was raised.
        points: The loads, in the order in which they were measured.
        replicas: Replicas that took the loads.
        applied: The highest load, measured again with its settings; None: they were not applied.
        warnings: Reasons to doubt the figures.
    """

    model: str
    requests: str
    goals: tuple[Goal, ...]
    over: Axis
    points: list[LoadPoint] = field(default_factory=list)
    replicas: int = 1
    applied: LoadPoint | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def best(self) -> LoadPoint | None:
        """The highest load that holds, below all loads that don't; None: there is none."""
        least = min((each.value for each in self.points if each.misses(self.goals)), default=math.inf)
        held = [each for each in self.points if each.value < least]
        return max(held, key=lambda each: each.value, default=None)

    @property
    def settings(self) -> TunedSettings | None:
        """The settings for the highest load."""
        return None if self.best is None else choose(self.best, self.goals, self.replicas)

    @property
    def holds(self) -> bool:
        """Whether a load holds the goals, with the settings too if they were applied."""
        again = self.applied is not None and self.applied.misses(self.goals)
        return self.best is not None and not again

    def load(self, value: float) -> str:
        """Return a load in words."""
        unit = "client" + ("" if value == 1 else "s") if self.over == "concurrency" else "requests/s"
        return f"{value:.4g} {unit}"

    def line(self, point: LoadPoint) -> str:
        """Return a point in one line, for the progress."""
        figures = ", ".join(f"{goal.name} {duration(point.seconds[goal.name])}" for goal in self.goals)
        return f"{self.load(point.value)}: {self.verdict(point)} ({figures}, {point.completed} requests)"

    def verdict(self, point: LoadPoint) -> str:
        """Return "holds", or the names of the goals that don't hold."""
        return " ".join(point.misses(self.goals)) or "holds"

    def text(self) -> str:
        """Return the result for people."""
        best, settings = self.best, self.settings
        figures = shown(self.goals)
        heads = ["", "load", *(f"{goal.metric.upper()} p{goal.percentile}" for goal in figures)]
        rows = [
            [
                "▶" if point is best else "",
                self.load(point.value),
                *(
                    duration(point.seconds[each.name]) if each.name in point.seconds else ""
                    for each in figures
                ),
                f"{point.rate:.4g}",
                f"{point.tokens_per_s:,.0f}",
                f"{point.in_flight:.0f}",
                f"{point.completed:,}",
                f"{point.failed:,}" if point.failed else "",
                self.verdict(point),
            ]
            for point in sorted(self.points, key=lambda each: each.value)
        ]
        heads += ["req/s", "tok/s", "in flight", "answers", "failed", ""]
        lines = [f"{self.model}: {self.requests}; {', '.join(map(str, self.goals))}", ""]
        lines += [*text_table(heads, rows, left={1, len(heads) - 1}), ""]
        if best is None or settings is None:
            lines += [f"No load holds: {self._why(min(self.points, key=lambda each: each.value))}"]
        else:
            lines += [
                f"highest load that holds: {self.load(best.value)}, {best.rate:.4g} requests/s, "
                f"{best.tokens_per_s:,.0f} tokens/s. Settings for it, in deployments:",
                f'- name: "Engine:{self.model}"',
                *(f"  {line}" for line in dump({"user_config": {"batcher": settings.batcher}}).splitlines()),
                f"  # with autoscaling_config: target_ongoing_requests: {settings.target_ongoing_requests} "
                "per replica",
            ]
        if self.applied is not None:
            verdict = "the goals hold" if self.holds else f"the goals don't hold: {self._why(self.applied)}"
            lines += ["", f"with these settings {verdict}"]
        return "\n".join(lines) + "\n"

    def body(self) -> dict[str, Any]:
        """Return the result for programs."""
        settings = self.settings
        return {
            "model": self.model,
            "requests": self.requests,
            "goals": [str(goal) for goal in self.goals],
            "over": self.over,
            "replicas": self.replicas,
            "loads": [self._fields(point) for point in self.points],
            "highest": self.best and self._fields(self.best),
            "settings": settings
            and {
                "batcher": settings.batcher,
                "target_ongoing_requests": settings.target_ongoing_requests,
            },
            "applied": self.applied and self._fields(self.applied),
            "warnings": self.warnings,
        }

    def _fields(self, point: LoadPoint) -> dict[str, Any]:
        return {
            "load": point.value,
            "holds": not point.misses(self.goals),
            "misses": point.misses(self.goals),
            "answers": point.completed,
            "failed": point.failed,
            "error": point.error,
            "requests_per_s": round(point.rate, 4),
            "output_tokens_per_s": round(point.tokens_per_s, 3),
            "in_flight": round(point.in_flight, 3),
            "seconds": {name: round(value, 6) for name, value in point.seconds.items()},
        }

    def _why(self, point: LoadPoint) -> str:
        """Return why a load doesn't hold."""
        total = point.completed + point.failed
        reasons = [
            f"{name} is {duration(point.seconds[name])}"
            if name != "errors"
            else f"{point.failed} of {total} requests failed ({point.error or 'no reason is known'})"
            for name in point.misses(self.goals)
        ]
        return f"at {self.load(point.value)}, {' and '.join(reasons)}"
