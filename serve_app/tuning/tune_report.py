"""The result of a tuning in words and for programs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.system.tables import duration, text_table
from serve_app.system.yaml_text import dump
from serve_app.tuning.goals import METRICS, Goal
from serve_app.tuning.load import LoadStep
from serve_app.tuning.tuner import Edge, TunedSettings

SHOWN = (50, 99)
"""Percentiles of every metric in a table."""


@dataclass(frozen=True, slots=True)
class BesideBatch:
    """Batch work beside live traffic.

    Attributes:
        live: The step of the live traffic.
        tokens_per_s: Tokens of the answers of the batch work, per second.
    """

    live: LoadStep
    tokens_per_s: float


@dataclass(slots=True)
class Tuning:
    """The result of a tuning, as far as it came.

    Attributes:
        model: The model.
        requests: The lengths of the requests, in words.
        goals: The goals.
        lone: The step with one client.
        closed: The edge of the closed loop.
        open: The edge of the open loop.
        single: Steps under loads that were given.
        choice: The settings.
        applied: Steps after the settings were applied; the last step says whether the goals hold.
        batch: Batch work beside live traffic.
        warnings: What makes the figures doubtful.
    """

    model: str
    requests: str
    goals: tuple[Goal, ...]
    lone: LoadStep | None = None
    closed: Edge | None = None
    open: Edge | None = None
    single: tuple[LoadStep, ...] = ()
    choice: TunedSettings | None = None
    applied: tuple[LoadStep, ...] = ()
    batch: BesideBatch | None = None
    warnings: tuple[str, ...] = ()

    @property
    def steps(self) -> list[LoadStep]:
        """The steps, merged by load, in the order of the loads."""
        found = [] if self.lone is None else [self.lone]
        for edge in (self.closed, self.open):
            if edge is not None:
                found += sorted(edge.points, key=lambda step: step.load.value)
        return [*found, *self.single]

    @property
    def best(self) -> LoadStep | None:
        """The highest rate that holds, if rates were measured."""
        if self.open is not None:
            return self.open.held
        return next((step for step in self.single if step.load.loop == "open" and step.holds), None)

    @property
    def holds(self) -> bool:
        """Whether a load holds the goals, of each kind that was measured."""
        if self.applied:
            return self.applied[-1].holds
        if self.batch is not None and not self.batch.live.holds:
            return False
        edges = [edge for edge in (self.open, self.closed) if edge is not None]
        return all(edge.held is not None for edge in edges) and all(step.holds for step in self.single)


def text(tuning: Tuning) -> str:
    """Return the result for people."""
    goals = ", ".join(map(str, tuning.goals))
    lines = [f"{tuning.model}: {tuning.requests}; {goals}", ""]
    lines += _table(tuning)
    lines += ["", *_edge_line("highest rate", tuning.open)]
    lines += _edge_line("highest concurrency", tuning.closed)
    if tuning.choice is not None:
        lines += ["", *choice_lines(tuning.choice, tuning.model)]
    if tuning.applied:
        last = tuning.applied[-1]
        verdict = "the goals hold" if last.holds else f"the goals don't hold: {reason(last)}"
        lines += ["", f"with these settings, at {last.load}: {verdict}"]
    if tuning.batch is not None:
        live = tuning.batch.live
        verdict = "its goals hold" if live.holds else f"its goals don't hold: {reason(live)}"
        tokens = f"batch work has {tuning.batch.tokens_per_s:,.0f} tokens/s"
        lines += ["", f"beside live traffic of {live.load} {tokens}, and {verdict}"]
    return "\n".join(lines) + "\n"


def body(tuning: Tuning) -> dict[str, Any]:
    """Return the result for programs."""
    choice, batch = tuning.choice, tuning.batch
    return {
        "model": tuning.model,
        "requests": tuning.requests,
        "goals": [str(goal) for goal in tuning.goals],
        "lone": tuning.lone and fields(tuning.lone),
        "highest_rate": tuning.open and _edge_fields(tuning.open),
        "highest_concurrency": tuning.closed and _edge_fields(tuning.closed),
        "steps": [fields(step) for step in tuning.steps],
        "choice": choice
        and {
            "rate": round(choice.rate, 4),
            "batcher": choice.batcher,
            "target_ongoing_requests": choice.target_ongoing_requests,
        },
        "applied": [fields(step) for step in tuning.applied],
        "beside_batch": batch
        and {"live": fields(batch.live), "batch_tokens_per_s": round(batch.tokens_per_s, 3)},
        "warnings": list(tuning.warnings),
    }


def fields(step: LoadStep) -> dict[str, Any]:
    """Return a step for programs; seconds that are infinite are null."""
    points = {(metric, point) for metric in METRICS for point in SHOWN} | {goal.key for goal in step.goals}
    seconds = {f"{metric}_p{point}": step.figure(metric, point) for metric, point in sorted(points)}
    return {
        "loop": step.load.loop,
        "value": step.load.value,
        "holds": step.holds,
        "misses": [str(goal) for goal in step.misses],
        "requests": step.sent,
        "failed": step.failed,
        "seconds": {
            name: round(value, 6) if math.isfinite(value) else None for name, value in seconds.items()
        },
        "requests_per_s": round(step.rate, 4),
        "goodput_per_s": round(step.goodput, 4),
        "output_tokens_per_s": round(step.tokens_per_s, 3),
        "in_flight": round(step.in_flight, 3),
        "most_in_flight": step.peak,
        "falls_behind": step.growing,
        "cut": step.cut,
        "spent_s": round(step.spent_s, 3),
    }


def choice_lines(choice: TunedSettings, model: str) -> list[str]:
    """Return the lines to put into a config."""
    dumped = dump({"user_config": {"batcher": choice.batcher}})
    return [
        f"settings for {choice.rate:.4g} requests/s, in deployments:",
        f'- name: "Engine:{model}"',
        *(f"  {line}" for line in dumped.splitlines()),
        f"  # with autoscaling_config: target_ongoing_requests: {choice.target_ongoing_requests} per replica",
    ]


def reason(step: LoadStep) -> str:
    """Return why a step doesn't hold; empty: it does."""
    if step.misses:
        return " ".join(goal.name for goal in step.misses)
    if step.growing:
        return "falls behind"
    return "too many late" if step.cut else "" if step.sent else "no requests"


def line(step: LoadStep) -> str:
    """Return a step in one line, for the progress."""
    shown = ", ".join(f"{goal.name} {_time(step.figure(*goal.key))}" for goal in step.goals)
    return f"{step.load}: {reason(step) or 'holds'} ({shown}, {step.sent} requests)"


def _edge_line(name: str, edge: Edge | None) -> Iterable[str]:
    if edge is None:
        return
    broken = f"{edge.broken.load} breaks" if edge.broken else "more was not tried"
    if edge.held is None:
        yield f"{name}: none holds" + (f"; {broken}" if edge.broken else "")
        return
    yield (
        f"{name}: {edge.held.load} ({broken}): {edge.held.goodput:.4g} requests/s within all bounds, "
        f"{edge.held.tokens_per_s:,.0f} tokens/s"
    )


def _edge_fields(edge: Edge) -> dict[str, Any]:
    return {
        "held": edge.held and fields(edge.held),
        "broken": edge.broken and edge.broken.load.value,
        "steps": len(edge.steps),
        "spent_s": round(sum(step.spent_s for step in edge.steps), 3),
    }


def _table(tuning: Tuning) -> Sequence[str]:
    """Return the lines of a table with a row for each load."""
    kept = [edge.held for edge in (tuning.closed, tuning.open) if edge is not None]
    points = [(metric, point) for metric in ("ttft", "tpot") for point in SHOWN]
    points += [goal.key for goal in tuning.goals if goal.key not in points]
    heads = ["", "load", *(f"{metric.upper()} p{point}" for metric, point in points)]
    heads += ["req/s", "tok/s", "in flight", "requests", ""]
    rows = [
        [
            "▶" if any(step is each for each in kept) else "",
            str(step.load),
            *(_time(step.figure(metric, point)) for metric, point in points),  # type: ignore[arg-type]
            f"{step.goodput:.4g}",
            f"{step.tokens_per_s:,.0f}",
            f"{step.in_flight:.0f}",
            str(step.sent),
            reason(step) or "holds",
        ]
        for step in tuning.steps
    ]
    return text_table(heads, rows, left={1, len(heads) - 1})


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return "failed" if math.isinf(seconds) else duration(seconds)
