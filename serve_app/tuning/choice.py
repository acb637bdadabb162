"""The settings that follow from the highest load which holds the goals."""

import math
from dataclasses import dataclass
from typing import Any

from serve_app.tuning.config_hint import batcher_goals
from serve_app.tuning.goals import Goal
from serve_app.tuning.load_step import Step, allowed
from serve_app.tuning.service import Facts

MARGIN = 0.95
"""Rate to plan with, as a share of the highest one that held: other requests draw other random numbers."""

CLOSE, CLOSE_MARGIN = 0.25, 0.88
"""The same where it held closely: by this share of the requests that may be late. They come in groups, so
other requests have several times as many."""

UNEVEN = 1.25
"""Requests of the replica that has the most, as a multiple of the mean."""

SPARE = 1.1
"""Requests that may run beyond those that ran."""

QUEUE_MARGIN = 1.5
"""Requests that may wait, as a multiple of those that start within the time to the first token."""

LEAST_QUEUE = 8

BACKGROUND_PART = 10
"""Queue of a model that has batch work too, as a multiple: that fills up to nine tenths of it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings, and the rate that they are for.

    Attributes:
        rate: Requests per second of all replicas.
        max_running: `batcher.max_running`.
        max_queue_size: `batcher.max_queue_size`; None: no goal bounds the wait.
        target_ongoing_requests: The same in `autoscaling_config`: requests in flight per replica.
        goals: `batcher.goals`; empty: there are none for p99.
    """

    rate: float
    max_running: int
    max_queue_size: int | None
    target_ongoing_requests: int
    goals: dict[str, float]

    @property
    def batcher(self) -> dict[str, Any]:
        """The settings under `batcher`."""
        queue = {} if self.max_queue_size is None else {"max_queue_size": self.max_queue_size}
        goals = {"goals": dict(self.goals)} if self.goals else {}
        return {"max_running": self.max_running, **queue, **goals}


def choose(
    step: Step, facts: Facts, goals: tuple[Goal, ...], rate: float | None = None, beside_batch: bool = False
) -> Choice:
    """Return the settings for a load that holds.

    `max_running` is the smallest window that doesn't hold back this load: the requests in flight that were
    exceeded in 1% of the time. The queue has as many as can start before their first token would be late.

    Args:
        step: The highest rate that holds.
        facts: The facts about the model, with the replicas that took the load.
        goals: The goals.
        rate: The rate to plan with; None: that of the step with a margin.
        beside_batch: Requests of the tier `flex` wait in the same queue.
    """
    replicas = facts.replicas
    uneven = UNEVEN if replicas > 1 else 1.0
    running = math.ceil(step.peak / replicas * uneven * SPARE)
    closely = any(step.missing(goal) >= CLOSE * allowed(goal) for goal in goals)
    chosen = (CLOSE_MARGIN if closely else MARGIN) * step.load.value if rate is None else rate
    wait = _wait_s(step, goals)
    queue = None
    if wait is not None:
        queue = max(LEAST_QUEUE, math.ceil(QUEUE_MARGIN * wait * step.load.value / replicas))
        queue *= BACKGROUND_PART if beside_batch else 1
    share = chosen / step.load.value if step.load.value else 1.0
    return Choice(
        rate=chosen,
        max_running=max(1, min(running, facts.max_num_seqs)),
        max_queue_size=queue,
        # Little's law: as many are in flight as come in the time of an answer.
        target_ongoing_requests=max(1, math.floor(step.in_flight * share / replicas)),
        goals=batcher_goals(goals),
    )


def _wait_s(step: Step, goals: tuple[Goal, ...]) -> float | None:
    """Return the longest wait in the queue with which the goals hold; None: they say nothing about it."""
    waits = [
        goal.bound - (step.figure("latency", 50) if goal.metric == "latency" else 0.0)
        for goal in goals
        if goal.metric != "tpot"
    ]
    return max(0.0, min(waits)) if waits else None
