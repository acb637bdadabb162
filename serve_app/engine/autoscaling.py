"""Autoscaling policy by tokens.

Ray Serve counts calls. One call of `/generate` may carry ten thousand prompts, so the replicas also
report the tokens that they hold (`record_autoscaling_stats`), from which this policy computes replicas.
A deployment uses it with, under `autoscaling_config`,

    policy:
      policy_function: serve_app.engine.autoscaling:ByTokens
      policy_kwargs: {target: 0.8}

Bounds, delays and factors come from the `autoscaling_config`, and Serve applies them as for its own policy.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

from batcher import ContinuousStats

IN_FLIGHT, QUEUED, CAPACITY = "tokens_in_flight", "tokens_queued", "token_capacity"
SEQUENCES, PLACES = "sequences", "sequence_capacity"

DEFAULT_TARGET = 0.8
"""Share of a replica's capacity that should be in use."""


def autoscaling_stats(stats: ContinuousStats) -> dict[str, float]:
    """Return the report of a replica to Serve.

    Args:
        stats: Its batcher's statistics.

    Returns:
        Running tokens; waiting tokens, here or in a call that is not all queued yet; the tokens that may run
        at once; the sequences that run or wait; the sequences that may run at once.
    """
    waiting = stats.queue_depth + stats.outside
    return {
        IN_FLIGHT: stats.running_cost,
        # Waiting costs are upper bounds, which are corrected after the start.
        QUEUED: (stats.queue_cost + stats.outside_cost) * stats.correction,
        CAPACITY: stats.capacity,
        SEQUENCES: stats.running + waiting,
        PLACES: stats.max_running or stats.capacity,
    }


class ByTokens:
    """Asks for as many replicas as hold all tokens and all sequences, each filled to a target.

    Args:
        target: Share, above 0 and up to 1, of the KV cache, and of the sequences of a step, that a replica
            should hold, running and waiting.

    Raises:
        ValueError: The target is out of range.
    """

    def __init__(self, target: float = DEFAULT_TARGET) -> None:
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 1:
            raise ValueError(f"policy_kwargs.target must be a number above 0 and up to 1, not {target!r}")
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the replicas that are needed now, before bounds and delays, and no state."""
        reported = context.aggregated_metrics or {}
        capacities = reported.get(CAPACITY, {})
        if not capacities:
            # No replica has reported yet.
            return context.target_num_replicas, {}
        load = 0.0
        for replica, capacity in capacities.items():
            tokens = reported[IN_FLIGHT].get(replica, 0.0) + reported[QUEUED].get(replica, 0.0)
            places = reported[PLACES].get(replica, capacity)
            load += max(tokens / capacity, reported[SEQUENCES].get(replica, 0.0) / places)
        # A request that waits at a handle is in no replica's report.
        least = 1 if load or context.total_num_requests else 0
        return max(least, math.ceil(load / self._target)), {}
