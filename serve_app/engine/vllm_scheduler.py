"""vLLM's scheduler with fewer messages to the replica; a plugin that vLLM loads in each of its processes.

Only files named vllm_* import vllm. The imports are those of vLLM 0.32.
"""

import os
import time
from typing import Any

from serve_app.engine.stream_interval import LONGEST_S
from serve_app.system.parent_death import TIED

STATS_S = 0.01
"""Seconds between two messages that hold statistics alone, at least. A longer step has one of its own."""


def hold_tokens() -> None:
    """Have the engines of a replica use schedulers with `HeldTokens`; other uses of vLLM stay as they are."""
    if TIED not in os.environ:
        return
    from vllm.config import SchedulerConfig

    chosen = SchedulerConfig.get_scheduler_cls

    def get_scheduler_cls(config: SchedulerConfig) -> type:
        return holding(chosen(config))

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def holding(scheduler: type) -> type:
    """Return a class of schedulers with `HeldTokens`; one that isn't derived from vLLM's is left as it is."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not issubclass(scheduler, Scheduler):
        return scheduler
    return type(scheduler.__name__, (HeldTokens, scheduler), {})


class HeldTokens:
    """What vLLM's schedulers tell the replica, in fewer messages.

    vLLM sends a message after each step, with the tokens of all requests, for which the replica wakes. Of a
    whole answer here the first token goes at once; those behind it are held for `LONGEST_S`, or until the
    answer ends. A step that tells of no request has no message but for the statistics, which come every
    `STATS_S`, and at once where nothing runs any more.

    Requests with stop strings, logprobs or a grammar are left as they are: the replica, or vLLM itself, looks at
    each of their tokens.
    """

    running: list[Any]
    _steps = 0
    _stats_due = 0.0

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **options: Any
    ) -> tuple[list[int], bool]:
        scheduler: Any = super()
        token_ids, stopped = scheduler._update_request_with_output(request, new_token_ids, *args, **options)
        now = time.monotonic()
        if "held" not in vars(request):
            # vLLM's requests have no such attribute.
            request.held = _Held(now) if _may_be_held(request) else None
        elif (held := request.held) is not None:
            if not stopped and now < held.told_at + LONGEST_S:
                # vLLM makes no output for a request without tokens.
                held.token_ids += token_ids
                return [], False
            token_ids = held.token_ids + token_ids
            request.held = _Held(now)
        return token_ids, stopped

    def make_stats(self, *args: Any, **options: Any) -> Any:
        """Return vLLM's statistics; None: they are not due.

        Their `step_counter`, which vLLM leaves at 0, is the number of steps since the last ones.
        """
        self._steps += 1
        now = time.monotonic()
        of_this_step = any(args) or any(options.values())
        if self.running and now < self._stats_due and not of_this_step:
            return None
        scheduler: Any = super()
        stats = scheduler.make_stats(*args, **options)
        if stats is not None:
            stats.step_counter = self._steps
        self._steps, self._stats_due = 0, now + STATS_S
        return stats


class _Held:
    """Tokens of a request that the replica has not been told, and the time at which it was told others."""

    __slots__ = ("token_ids", "told_at")

    def __init__(self, told_at: float) -> None:
        self.token_ids: list[int] = []
        self.told_at = told_at


def _may_be_held(request: Any) -> bool:
    """Return whether a request is a whole answer of which nothing but the tokens is told."""
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.stop
        and params.num_logprobs is None
        and not request.use_structured_output
        and not request.resumable
    )
