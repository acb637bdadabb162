"""vLLM's scheduler with live traffic first: rows of batches give way, step by step.

The imports are those of vLLM 0.32.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from serve_app.engine.steps import StepTimes, Work
from serve_app.engine.vllm.held_tokens import HeldTokens

GOALS = "saturate_goals"
"""Key of a live request's goals in the `extra_args` of its sampling parameters, which vLLM has for plugins.

The goals are the seconds that are left until the first token, and the seconds per token after it; 0: no goal.
A client can write `extra_args` too, so the engine's client sets or removes the key in each request."""

STEPS_TO_FIRST = 3
"""Steps until the first token of a live request, at most: the running one, a decided one, and its own."""

LIVE_S = 10.0
"""Seconds for which steps stay bounded after the last live request."""

SPREAD = 1.5
"""Most prompt tokens of rows in a step, in relation to their mean of late."""

LATE_STEPS = 24
"""Steps over which that mean is taken."""

TRICKLE = 16
"""Prompt tokens of rows that a step may always have: rows never stand still for a goal that can't be met."""

AGING_S = 10.0
"""Seconds without a row in any step after which the first row that waits counts as live."""

LEAST_HOLD_S = 0.005
"""Shortest time for which a decision is held back."""

SUBMITS, SUBMITS_S = 2.5, 0.003
"""Longest time to submit a step: a multiple of its first part, for the sampling, and seconds more."""

REMOTE_S = 0.004
"""Seconds that are added where workers are other processes, which prepare a step unseen."""

LOOKS = 2
"""Steps that are decided at once after a decision that came too late: their times are seen exactly."""

ERRORS = 2.0
"""Mean errors of the predicted times by which a decision comes earlier."""

LEFT_OUT = 1 / 8
"""Share of the rows that wait for blocks of the KV cache, at most; then the youngest row is preempted."""

SHORT_STEPS = 16
"""Steps without new rows after one in which a row waited for blocks."""


def build_scheduler(vllm_config: Any, **options: Any) -> Any:
    """Return the scheduler of an engine; the option `scheduler_cls` names this function.

    Args:
        vllm_config: The engine's configuration.
        options: The other arguments of a scheduler.
    """
    return scheduler_class(vllm_config)(vllm_config=vllm_config, **options)


def scheduler_class(vllm_config: Any, live_first: type | None = None, *, held: bool = True) -> Any:
    """Return the class of an engine's scheduler.

    With `scheduling_policy: fcfs` requests run in the order of their arrival, as in vLLM.

    Args:
        vllm_config: The engine's configuration.
        live_first: A subclass of `LiveFirst` to use.
        held: Tokens are held back, see `HeldTokens`.
    """
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    if vllm_config.diffusion_config is not None:
        name = "DiffusionAsyncScheduler" if config.async_scheduling else "DiffusionScheduler"
        config.scheduler_cls = f"vllm.v1.core.sched.diffusion_scheduler.{name}"
    scheduler = config.get_scheduler_cls()
    first = () if config.policy == "fcfs" else (live_first or LiveFirst,)
    tokens = (HeldTokens,) if held else ()
    return type(scheduler.__name__, (*tokens, *first, scheduler), {})


class _Goals(NamedTuple):
    """The goals of a request in seconds; 0: no goal.

    Attributes:
        first_s: Until its first token, without the time of its own prompt.
        token_s: Per token after the first.
    """

    first_s: float
    token_s: float


class _Step(NamedTuple):
    """A step that was submitted: its work, and the time of its submission."""

    work: Work
    at: float


class LiveFirst:
    """A scheduler of vLLM whose steps give way to live requests.

    Requests with a priority above 0 are rows. While live requests are there, each step is prepared:

    - Live requests go first, those that run and those that wait.
    - The youngest rows are preempted where a live request needs a place or blocks of the KV cache.
    - Prompts of rows make the step no longer than its bound, which follows from the goals.
    - Rows are left out of the step, with their blocks held, where decodes alone exceed the bound.
    - The step is decided just before the running one ends, so that a request which comes meanwhile is in it.

    Rows alone run as vLLM has it, with one exception. Where the KV cache is too small for the rows that run,
    the youngest of them wait for blocks, and only then is one preempted.

    Attributes:
        times: The learned times of steps.
    """

    # What vLLM's scheduler has.
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    kv_cache_manager: Any
    kv_cache_config: Any
    vllm_config: Any
    lora_config: Any
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    num_waiting_for_streaming_input: int
    num_lookahead_tokens: int
    block_size: int
    requires_kv_delivery: bool

    clock = staticmethod(time.monotonic)
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        parallel, scheduler = self.vllm_config.parallel_config, self.vllm_config.scheduler_config
        alone = parallel.pipeline_parallel_size == parallel.data_parallel_size == 1
        self.times = StepTimes()
        self._most_tokens, self._most_active = self.max_num_scheduled_tokens, self.max_num_active_reqs
        # A prompt that can't be cut would wait for ever.
        self._may_bound = scheduler.enable_chunked_prefill
        self._may_hold = alone and scheduler.async_scheduling
        self._spare_s = SUBMITS_S + (REMOTE_S if parallel.world_size > 1 else 0.0)
        self._submitted: deque[_Step] = deque()  # steps without an output yet
        self._ended_at = self._decided_at = self._row_at = self.clock()
        self._live_until = -math.inf
        self._first_s = 0.0  # the last live request's goal for its first token
        self._usual = 0.0  # mean prompt tokens of rows in a step
        # Means: to decide a step, and for the first part of its submission.
        self._decides_s = self._submits_s = 0.0
        self._error_s = 0.0  # mean error of the predicted times
        self._held = False  # the last decision was held back
        self._looks = 0  # steps that are still to be decided at once
        self._short = 0  # steps for which no row is added

    def add_request(self, request: Any) -> None:
        """Take in a request, with its goals if it is live."""
        request.goals_s = _Goals(0.0, 0.0)
        if request.priority <= 0:
            self._first_s, token_s = _goals(request)
            own_s = self.times.per_prompt_token * request.num_prompt_tokens
            first_s = max(self._first_s - own_s, LEAST_HOLD_S) if self._first_s else 0.0
            request.goals_s = _Goals(first_s, token_s)
        elif not self.requests:
            self._row_at = self.clock()
        super().add_request(request)  # type: ignore[misc]

    def has_requests(self) -> bool:
        """Return whether there is work; vLLM asks before it takes in requests, and decides a step then.

        While live requests are there, the answer comes when the running step is about to end.
        """
        if (hold_s := self._early_s()) > LEAST_HOLD_S:
            self._held = True
            self.sleep(hold_s)
        return bool(super().has_requests())  # type: ignore[misc]

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Return the next step."""
        began = self.clock()
        left_out = self._prepare(began)
        try:
            output = super().schedule(*arguments, **options)  # type: ignore[misc]
        finally:
            self.running += left_out
            self.max_num_scheduled_tokens, self.max_num_active_reqs = self._most_tokens, self._most_active
        # A decision without work may come too late, too: no step follows an answer of one token.
        now = self._decided_at = self.clock()
        if output.total_num_scheduled_tokens:
            self._decides_s += (now - began - self._decides_s) / 8
            self._looks -= self._looks > 0
            self._submitted.append(_Step(self._work(output), now))
        return output

    def get_grammar_bitmask(self, *arguments: Any, **options: Any) -> Any:
        """Return the bitmask of a step; vLLM asks for it between the two parts of each submission."""
        self._submits_s += (self.clock() - self._decided_at - self._submits_s) / 8
        return super().get_grammar_bitmask(*arguments, **options)  # type: ignore[misc]

    def update_from_output(self, output: Any, *arguments: Any, **options: Any) -> Any:
        """Take in the output of a step."""
        if output.total_num_scheduled_tokens:
            now, step = self.clock(), self._submitted.popleft()
            if self._held and now - self._decided_at < 2 * self._submits_s + SUBMITS_S / 2:
                # The step had ended before the decision that was held back for it. So its time isn't known.
                self._looks = LOOKS
            else:
                took = now - max(step.at, self._ended_at)
                error = min(abs(took - self.times.predict(step.work)), took)
                self._error_s += (error - self._error_s) / 32
                self.times.learn(step.work, took)
            self._ended_at, self._held = now, False
        return super().update_from_output(output, *arguments, **options)  # type: ignore[misc]

    def _early_s(self) -> float:
        """Return the seconds by which it is too early to decide the next step."""
        if not self._may_hold or self._looks or len(self._submitted) != 1 or not self.times.known:
            return 0.0
        now, (work, at) = self.clock(), self._submitted[0]
        if now >= self._live_until:
            return 0.0
        ends_at = max(at, self._ended_at) + self.times.predict(work) - ERRORS * self._error_s
        return ends_at - now - self._decides_s - SUBMITS * self._submits_s - self._spare_s

    def _work(self, output: Any) -> Work:
        """Return the work of a step that was decided, and take in the prompts of rows in it."""
        counts = output.num_scheduled_tokens
        context = rows = 0
        for each, count in counts.items():
            request = self.requests[each]
            context += request.num_computed_tokens
            if count > 1 and request.priority > 0:
                rows += count
        self._usual += (rows - self._usual) / LATE_STEPS
        return Work(output.total_num_scheduled_tokens - len(counts), len(counts), context)

    def _prepare(self, now: float) -> list[Any]:
        """Set the limits of the next step; return the rows that are left out, which `running` has no more."""
        live = self._waiting_live()
        rows = sum(each.priority > 0 for each in self.running)
        if live or rows < len(self.running):
            self._live_until = now + LIVE_S
        if rows or len(self.waiting) == len(live):
            self._row_at = now
        elif now >= self._row_at + AGING_S:
            self._promote()
            return self._prepare(self._row_at + AGING_S / 2)
        if not rows and len(self.waiting) == len(live):
            return []
        waiting = [each for each in live if _may_run(each)]
        # By priority, and by arrival: the youngest rows are the last ones.
        self.running.sort()
        self._displace(waiting)
        left_out = self._leave_out(self._without_blocks(waiting))
        if now < self._live_until and self._may_bound and self.times.known:
            left_out += self._leave_out(self._bound(waiting))
        self.max_num_active_reqs -= len(left_out)
        if self._short:
            # Rows that are added would need the blocks for which others wait.
            self.max_num_active_reqs = min(self.max_num_active_reqs, len(self.running) + len(waiting))
        return left_out

    def _waiting_live(self) -> list[Any]:
        """Return the live requests that wait, in their order."""
        found = []
        for each in self.waiting:
            if each.priority > 0:
                break
            found.append(each)
        return found

    def _promote(self) -> None:
        """Let the first row that waits count as live."""
        row = next(each for each in self.waiting if each.priority > 0)
        self.waiting.remove_request(row)
        row.priority = 0
        self.waiting.add_request(row)
        self._row_at = self.clock()

    def _displace(self, waiting: list[Any]) -> None:
        """Preempt the youngest rows, as far as live requests that wait need their places and blocks."""
        places = self._most_active - self.num_waiting_for_streaming_input - len(self.running)
        tokens, blocks = self._most_tokens, 0
        for each in waiting:
            if tokens <= 0:
                break
            part = min(self._left(each), tokens)
            tokens -= part
            blocks += self._blocks(part)
            places -= 1
            while (places < 0 or blocks > self._blocks_free()) and self._preempt_youngest():
                places += 1

    def _preempt_youngest(self) -> bool:
        """Preempt the youngest row; False: there is none."""
        row = max((each for each in self.running if each.priority > 0), default=None)
        if row is None or not self._request_blocks_can_be_freed(row):  # type: ignore[attr-defined]
            return False
        self.running.remove(row)
        self._preempt_request(  # type: ignore[attr-defined]
            row, time.monotonic(), drop_stale_output=self.requires_kv_delivery
        )
        return True

    def _without_blocks(self, waiting: list[Any]) -> list[Any]:
        """Return the youngest rows, as far as the KV cache has no blocks for them in this step.

        Blocks come free whenever a request ends, so a row that waits is rarely preempted after all.
        """
        if not self.kv_cache_config.kv_cache_groups:
            return []
        self._short -= self._short > 0
        rows = sum(each.priority > 0 for each in self.running)
        while True:
            free = self._blocks_free() - sum(self._blocks(self._left(each)) for each in waiting)
            wait = []
            for each in self.running:
                need = self._growth(each)
                if need and need > free and each.priority > 0:
                    wait.append(each)
                else:
                    free -= need
            if not wait:
                return []
            self._short = SHORT_STEPS
            if len(wait) <= LEFT_OUT * rows and len(wait) < len(self.running):
                return wait
            if not self._preempt_youngest():
                return []

    def _bound(self, waiting: list[Any]) -> list[Any]:
        """Bound the prompt tokens of rows in the next step; return the rows that are left out for time."""
        decodes, parts = [], []
        tokens = context = prompts = 0
        goals_s = [_goal_s(each) for each in waiting]
        for each in self.running:
            left = _unscheduled(each)
            if each.priority <= 0:
                goals_s.append(_goal_s(each))
            if not each.is_prefill_chunk:
                decodes.append(each)
                tokens += left
                context += each.num_computed_tokens
            elif each.priority > 0:
                parts.append(each)
            else:
                prompts += left
        prompts += sum(map(self._left, waiting))
        usual_s = self._usual_s(Work(0, len(decodes), context))
        bound_s = min([usual_s, *filter(None, goals_s)])
        left_out = []
        # The oldest row stays in the step.
        while len(decodes) > 1 and decodes[-2].priority > 0:
            if self.times.predict(Work(0, len(decodes), context)) <= bound_s:
                break
            row = decodes.pop()
            tokens -= _unscheduled(row)
            context -= row.num_computed_tokens
            left_out.append(row)
        if self._first_s:
            # A request that comes meanwhile has the same goal. Decodes of rows don't stop for it.
            bound_s = min(bound_s, self._first_s / STEPS_TO_FIRST)
        space = self.times.prompt_tokens(bound_s, Work(0, len(decodes), context)) - prompts
        space = max(space, TRICKLE)
        if waiting:
            # vLLM goes on with prompts before it begins others: those of rows would take the step.
            taken = 0
            for row in parts:
                if taken + _unscheduled(row) > space:
                    left_out.append(row)
                else:
                    taken += _unscheduled(row)
        self.max_num_scheduled_tokens = min(self._most_tokens, tokens + prompts + space)
        return left_out

    def _usual_s(self, decodes: Work) -> float:
        """Return the seconds that the next step may take without goals.

        Prompts of rows are spread over the steps: a step has little more of them than the mean of late, or as
        many as double its time. A batch that has more to do raises the mean.
        """
        decodes_s = self.times.predict(decodes)
        return decodes_s + max(decodes_s, SPREAD * self._usual * self.times.per_prompt_token)

    def _leave_out(self, rows: list[Any]) -> list[Any]:
        """Take rows out of `running`; return them.

        vLLM counts the adapters of a step, and adds requests with further ones as far as there are slots.
        So rows with adapters stay where the slots are too few for all adapters that were asked for.
        """
        if self.lora_config:
            adapters = {_adapter(each) for each in self.requests.values()} - {None}
            if len(adapters) > self.lora_config.max_loras:
                rows = [row for row in rows if _adapter(row) is None]
        for row in rows:
            self.running.remove(row)
        return rows

    def _left(self, request: Any) -> int:
        """Return the tokens that a request which waits needs until its first one."""
        cached = request.num_computed_tokens or self.kv_cache_manager.get_computed_blocks(request)[1]
        return int(request.num_tokens - cached)

    def _growth(self, request: Any) -> int:
        """Return the blocks of the KV cache that a running request needs in the next step, at most."""
        tokens = min(_unscheduled(request), self._most_tokens) + self.num_lookahead_tokens
        inside = -request.num_computed_tokens % self.block_size
        return self._blocks(max(0, tokens - inside))

    def _blocks(self, tokens: int) -> int:
        """Return the blocks of the KV cache for tokens."""
        return -(-tokens // self.block_size) * len(self.kv_cache_config.kv_cache_groups)

    def _blocks_free(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())


def _goals(request: Any) -> tuple[float, float]:
    """Return the goals that the engine's client has told, in seconds; zeros for anything else than a pair."""
    params = request.sampling_params
    match (params.extra_args or {}).get(GOALS) if params is not None else None:
        case [float(first_s), float(token_s)] if 0 <= first_s < math.inf and 0 <= token_s < math.inf:
            return first_s, token_s
    return 0.0, 0.0


def _goal_s(request: Any) -> float:
    """Return the longest step that suits a live request, in seconds; 0: it has no goal now."""
    if request.num_output_tokens or request.num_computed_tokens >= request.num_prompt_tokens:
        return float(request.goals_s.token_s)
    return float(request.goals_s.first_s) / STEPS_TO_FIRST


def _may_run(request: Any) -> bool:
    """Return whether a request that waits can be in the next step: a grammar of it is compiled."""
    if (asked := request.structured_output_request) is None:
        return True
    return asked.grammar is not None and not isinstance(asked.grammar, Exception)


def _unscheduled(request: Any) -> int:
    """Return the tokens of a running request that no step has yet."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)


def _adapter(request: Any) -> int | None:
    return request.lora_request.lora_int_id if request.lora_request else None
