"""A goal: a bound for a percentile of a latency."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Metric = Literal["ttft", "tpot", "latency"]

METRICS: dict[Metric, str] = {
    "ttft": "seconds to the first token",
    "tpot": "seconds per token after the first",
    "latency": "seconds to the whole answer",
}
"""Metrics of a request, and their meaning."""

EXAMPLE = "ttft_p99<0.5,tpot_p99<0.05"


class GoalError(ValueError):
    """A goal can't be read; the message names the part and the allowed values."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound for a percentile of a latency.

    Attributes:
        metric: "ttft", "tpot" or "latency"; see `METRICS`.
        percentile: 1 to 99: the number of requests out of 100 that keep the bound.
        bound: Seconds below which the percentile has to be.
    """

    metric: Metric
    percentile: int
    bound: float

    def __str__(self) -> str:
        return f"{self.name}<{self.bound:g}"

    @property
    def name(self) -> str:
        """The metric with its percentile, such as "ttft_p99"."""
        return f"{self.metric}_p{self.percentile}"

    @property
    def allowed(self) -> float:
        """Share of requests that may miss the bound, 0 to 1."""
        return 1 - self.percentile / 100 + 1e-9

    @property
    def key(self) -> tuple[Metric, int]:
        """The metric and the percentile, as figures have them."""
        return self.metric, self.percentile

    @classmethod
    def parse(cls, text: str) -> "Goal":
        """Return the goal of a text such as "ttft_p99<0.5".

        Raises:
            GoalError: The text is no goal.
        """
        match = re.fullmatch(r"\s*([^<\s]*)\s*<\s*(\S+)\s*", text)
        if match is None:
            raise GoalError(f"{text.strip()!r} is no goal; write METRIC_PERCENTILE<SECONDS, as in {EXAMPLE}")
        name, bound = match.groups()
        metric, _, percentile = name.rpartition("_")
        if metric not in METRICS:
            allowed = ", ".join(f"{each} ({about})" for each, about in METRICS.items())
            raise GoalError(f"{text.strip()!r}: {metric or name!r} is no metric; take one of {allowed}")
        if not re.fullmatch(r"p[1-9][0-9]?", percentile):
            raise GoalError(f"{text.strip()!r}: {percentile!r} is no percentile; write p1 to p99, as in p99")
        try:
            seconds = float(bound)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise GoalError(f"{text.strip()!r}: {bound!r} is no bound; write seconds above 0, as in 0.5")
        return cls(metric, int(percentile[1:]), seconds)


def parse_goals(text: str) -> tuple[Goal, ...]:
    """Return the goals of a text, with commas between them.

    Raises:
        GoalError: A part is no goal, two goals bound the same figure, or there is no goal.
    """
    goals = tuple(Goal.parse(part) for part in text.split(",") if part.strip())
    if not goals:
        raise GoalError(f"there is no goal; write one or several, as in {EXAMPLE}")
    _check_names(goals)
    return goals


def _check_names(goals: Sequence[Goal]) -> None:
    names = [goal.name for goal in goals]
    for name in names:
        if names.count(name) > 1:
            raise GoalError(f"{name} has two bounds; give one")


def batcher_goals(goals: Sequence[Goal]) -> dict[str, float]:
    """Return the goals that `batcher.goals` has, by their names there: `ttft_p99_s` and `tpot_p99_s`."""
    found = {goal.name: goal.bound for goal in goals if goal.percentile == 99 and goal.metric != "latency"}
    return {f"{name}_s": found[name] for name in sorted(found, reverse=True)}
