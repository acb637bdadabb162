"""The words and tables of a tuning."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.system.yaml_text import dump
from serve_app.tuning.choice import Choice
from serve_app.tuning.edge import Edge
from serve_app.tuning.goals import METRICS, Goal
from serve_app.tuning.load_step import SHOWN, Step


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch work beside live traffic.

    Attributes:
        live: The step of the live traffic.
        tokens_per_s: Tokens of the answers of the batch work, per second.
    """

    live: Step
    tokens_per_s: float


@dataclass(slots=True)
class Tuning:
    """The result of a tuning, as far as it came.

    Attributes:
        model: The model.
        question: The lengths of the requests, in words.
        goals: The goals.
        lone: The step with one client.
        closed: The edge of the closed loop.
        open: The edge of the open loop.
        single: Steps under loads that were given.
        choice: The settings.
        applied: Steps after the settings were applied; the last one says whether the goals hold.
        batch: Batch work beside live traffic.
        warnings: What makes the figures doubtful.
    """

    model: str
    question: str
    goals: tuple[Goal, ...]
    lone: Step | None = None
    closed: Edge | None = None
    open: Edge | None = None
    single: tuple[Step, ...] = ()
    choice: Choice | None = None
    applied: tuple[Step, ...] = ()
    batch: Batch | None = None
    warnings: tuple[str, ...] = ()

    @property
    def steps(self) -> list[Step]:
        """The steps, of each load one, in the order of the loads."""
        found = [] if self.lone is None else [self.lone]
        for edge in (self.closed, self.open):
            if edge is not None:
                found += sorted(edge.points, key=lambda step: step.load.value)
        return [*found, *self.single]

    @property
    def best(self) -> Step | None:
        """The highest rate that holds, if rates were measured."""
        if self.open is not None:
            return self.open.held
        return next((step for step in self.single if step.load.loop == "open" and step.holds), None)


def text(tuning: Tuning) -> str:
    """Return the result for people."""
    goals = ", ".join(map(str, tuning.goals))
    lines = [f"{tuning.model}: {tuning.question}; {goals}", ""]
    kept = [edge.held for edge in (tuning.closed, tuning.open) if edge is not None]
    lines += _table(tuning.steps, tuning.goals, kept)
    lines.append("")
    lines += _edge_lines("highest rate", tuning.open)
    lines += _edge_lines("highest concurrency", tuning.closed)
    if tuning.choice is not None:
        lines += ["", *choice_lines(tuning.choice, tuning.model)]
    if tuning.applied:
        last = tuning.applied[-1]
        verdict = "the goals hold" if last.holds else f"the goals don't hold: {reason(last)}"
        lines += ["", f"with these settings, at {last.load}: {verdict}"]
    if tuning.batch is not None:
        live, verdict = tuning.batch.live, "its goals hold"
        if not live.holds:
            verdict = f"its goals don't hold: {reason(live)}"
        lines += [
            "",
            f"beside live traffic of {live.load} batch work has {tuning.batch.tokens_per_s:,.0f} tokens/s, "
            f"and {verdict}",
        ]
    return "\n".join(lines) + "\n"


def body(tuning: Tuning) -> dict[str, Any]:
    """Return the same for programs."""
    choice = tuning.choice
    return {
        "model": tuning.model,
        "requests": tuning.question,
        "goals": [str(goal) for goal in tuning.goals],
        "lone": None if tuning.lone is None else fields(tuning.lone),
        "highest_rate": _edge_fields(tuning.open),
        "highest_concurrency": _edge_fields(tuning.closed),
        "steps": [fields(step) for step in tuning.steps],
        "choice": None
        if choice is None
        else {
            "rate": round(choice.rate, 4),
            "batcher": choice.batcher,
            "target_ongoing_requests": choice.target_ongoing_requests,
        },
        "applied": [fields(step) for step in tuning.applied],
        "beside_batch": None
        if tuning.batch is None
        else {
            "live": fields(tuning.batch.live),
            "batch_tokens_per_s": round(tuning.batch.tokens_per_s, 3),
        },
        "warnings": list(tuning.warnings),
    }


def fields(step: Step) -> dict[str, Any]:
    """Return a step for programs; seconds that are infinite are null."""
    points = {(metric, point) for metric in METRICS for point in SHOWN}
    points |= {(goal.metric, goal.percentile) for goal in step.goals}
    return {
        "loop": step.load.loop,
        "value": step.load.value,
        "holds": step.holds,
        "misses": [str(goal) for goal in step.misses],
        "requests": step.sent,
        "failed": step.failed,
        "seconds": {
            f"{metric}_p{point}": round(value, 6) if math.isfinite(value) else None
            for metric, point in sorted(points)
            for value in [step.figure(metric, point)]
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


def choice_lines(choice: Choice, model: str) -> list[str]:
    """Return the lines to put into a config."""
    lines = [f"settings for {choice.rate:.4g} requests/s, in deployments:", f'- name: "Engine:{model}"']
    dumped = dump({"user_config": {"batcher": choice.batcher}})
    lines += [f"  {line}" for line in dumped.splitlines()]
    lines.append(
        f"  # with autoscaling_config: target_ongoing_requests: {choice.target_ongoing_requests} per replica"
    )
    return lines


def reason(step: Step) -> str:
    """Return why a step doesn't hold; empty: it does."""
    if step.misses:
        return " ".join(goal.name for goal in step.misses)
    if step.growing:
        return "falls behind"
    return "too many late" if step.cut else "" if step.sent else "no requests"


def line(step: Step) -> str:
    """Return a step in one line, for the progress."""
    shown = ", ".join(
        f"{goal.name} {_time(step.figure(goal.metric, goal.percentile))}" for goal in step.goals
    )
    return f"{step.load}: {reason(step) or 'holds'} ({shown}, {step.sent} requests)"


def _edge_lines(name: str, edge: Edge | None) -> list[str]:
    if edge is None:
        return []
    if edge.held is None:
        least = f"; {edge.broken.load} breaks" if edge.broken else ""
        return [f"{name}: none holds{least}"]
    held = edge.held
    broken = f"{edge.broken.load} breaks" if edge.broken else "more was not tried"
    return [
        f"{name}: {held.load} ({broken}): {held.goodput:.4g} requests/s within all bounds, "
        f"{held.tokens_per_s:,.0f} tokens/s"
    ]


def _edge_fields(edge: Edge | None) -> dict[str, Any] | None:
    if edge is None:
        return None
    return {
        "held": None if edge.held is None else fields(edge.held),
        "broken": None if edge.broken is None else edge.broken.load.value,
        "steps": len(edge.steps),
        "spent_s": round(sum(step.spent_s for step in edge.steps), 3),
    }


def _table(steps: Iterable[Step], goals: Sequence[Goal], kept: Sequence[Step | None]) -> list[str]:
    """Return the lines of a table with a row for each load."""
    points = [(metric, point) for metric in ("ttft", "tpot") for point in SHOWN]
    points += [(g.metric, g.percentile) for g in goals if (g.metric, g.percentile) not in points]
    heads = ["", "load", *(f"{metric.upper()} p{point}" for metric, point in points)]
    heads += ["req/s", "tok/s", "in flight", "requests", ""]
    rows = [heads]
    for step in steps:
        rows.append(
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
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {1, len(heads) - 1}
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    if math.isinf(seconds):
        return "failed"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
