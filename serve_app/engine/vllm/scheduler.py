"""vLLM's scheduler with live traffic first: rows of batches give way, step by step."""

import copy
import math
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from serve_app.engine.steps import StepTimes
from serve_app.engine.vllm.held_tokens import HeldTokens
from serve_app.engine.vllm.seams import SEAMS
from serve_app.simulation.profiles import Work

GOALS = "saturate_goals"
"""Key of a live request's goals in the `extra_args` of its sampling parameters, which vLLM has for plugins.

The goals are the seconds that are left until the first token, and the seconds per token after it; 0: no goal.
A client can write `extra_args` too, so the engine's client sets or removes the key in each request."""

FIGURES = "saturate:"
"""Prefix of the scheduler's figures among vLLM's counts of requests by stage: whole numbers, times in µs."""

STEPS_TO_FIRST = 3
"""Steps until the first token of a live request, at most: the running one, a decided one, and its own."""

LIVE_S = 10.0
"""Seconds for which steps stay bounded after the last live request."""

SPREAD = 1.5
"""Maximum prompt tokens of rows in a step, in relation to their mean of late."""

LATE_STEPS = 24
"""Steps over which that mean is taken."""

TRICKLE = 16
"""Prompt tokens of rows that a step may always have: rows never stand still for a goal that can't be met."""

WHOLE_STEPS = 16
"""Steps until a row may have a part of its prompt that can't be cut, however long the part is."""

AGING_S = 10.0
"""Seconds without a row in any step after which the first row that waits counts as live."""

LEAST_HOLD_S = 0.005
"""Shortest time for which a decision is held back."""

SUBMITS, SUBMITS_S = 2.5, 0.003
"""Longest time to submit a step: a multiple of its first part, for the sampling, and seconds more."""

REMOTE_S = 0.004
"""Seconds that are added where workers are processes of their own, whose preparation of a step isn't seen."""

LOOKS = 2
"""Steps that are decided at once after a decision that came too late: their times are seen exactly."""

ERRORS = 2.0
"""Mean errors of the predicted times by which a decision comes earlier."""


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
        config.scheduler_cls = f"{SEAMS[name].module}.{name}"
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


class _Waiting(NamedTuple):
    """A request that waits and can run: the tokens that it has left, and its hits in the prefix cache."""

    request: Any
    left: int
    computed: int
    hits: Any


class _Room:
    """The room for rows in the step that is decided.

    Attributes:
        prompts: Tokens of rows' prompts that the step may still have.
        whole: Whether a part that can't be cut may exceed them.
        images: Whether images of rows may be encoded.
        without: Rows that decode and are left out for time.
        left_out: Rows that were left out.
        given: Tokens of rows' prompts in the step.
    """

    def __init__(self) -> None:
        self.prompts, self.whole, self.images = math.inf, False, True
        self.without: set[Any] = set()
        self.left_out = self.given = 0


class LiveFirst:
    """A scheduler of vLLM whose steps give way to live requests.

    Requests with a priority above 0 are rows. While live requests are there, each step is prepared:

    - Live requests go first, running and waiting.
    - The youngest rows are preempted where a live request needs a place or blocks of the KV cache.
    - Prompts of rows make the step no longer than its bound, which follows from the goals.
    - Rows are left out of the step, with their blocks held, where decodes alone exceed the bound.
    - The step is decided just before the running one ends, so that a request which comes meanwhile is in it.

    vLLM asks for each request how many tokens it takes, and a row gets as many as the step has room for.

    Rows alone run as vLLM has it.

    Attributes:
        times: The learned times of steps.
    """

    # What vLLM's scheduler has.
    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    requests: dict[str, Any]
    kv_cache_manager: Any
    kv_cache_config: Any
    encoder_cache_manager: Any
    scheduler_config: Any
    vllm_config: Any
    lora_config: Any
    finished_recving_kv_req_ids: set[str]
    max_model_len: int
    block_size: int
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    current_step: int
    num_waiting_for_streaming_input: int
    num_lookahead_tokens: int
    num_spec_tokens: int
    need_mamba_block_aligned_split: bool
    requires_kv_delivery: bool
    is_encoder_decoder: bool
    scheduler_reserve_full_isl: bool

    clock = staticmethod(time.monotonic)
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        parallel, scheduler = self.vllm_config.parallel_config, self.vllm_config.scheduler_config
        alone = parallel.pipeline_parallel_size == parallel.data_parallel_size == 1
        self.times = StepTimes()
        self._most_active = self.max_num_active_reqs
        self._stages = int(parallel.pipeline_parallel_size)
        # A prompt that can't be cut would wait for ever.
        self._may_bound = scheduler.enable_chunked_prefill
        self._may_hold = alone and scheduler.async_scheduling
        self._spare_s = SUBMITS_S + (REMOTE_S if parallel.world_size > 1 else 0.0)
        self._room: _Room | None = None
        self._aside: list[tuple[Any, list[Any]]] = []  # requests that wait behind this step, by their queue
        self._submitted: deque[_Step] = deque()  # steps without an output yet
        self._ended_at = self._decided_at = self._row_at = self.clock()
        self._live_until = -math.inf
        self._first_s = 0.0  # the last live request's goal for its first token
        self._usual = 0.0  # mean prompt tokens of rows in a step
        self._per_decode = 1.0  # mean tokens of a decode: drafts that are accepted are further ones
        self._whole = 0  # steps since a part that can't be cut exceeded its bound
        # Means: to decide a step, and for the first part of its submission.
        self._decides_s = self._submits_s = 0.0
        self._error_s = 0.0  # mean error of the predicted times
        self._held = False  # the last decision was held back
        self._looks = 0  # steps that are still to be decided at once
        self._figures = dict.fromkeys(("bound_us", "left_out", "displaced", "malformed"), 0)

    def add_request(self, request: Any) -> None:
        """Note a request, with its goals if it is live."""
        request.goals_s = _Goals(0.0, 0.0)
        if request.priority <= 0:
            self._first_s, token_s = self._goals(request)
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
        if self._adapters_crowd():
            self._keep_slots()
        self._room = self._prepare(began)
        try:
            output = super().schedule(*arguments, **options)  # type: ignore[misc]
        finally:
            room, self._room = self._room, None
            self.max_num_active_reqs = self._most_active
            for queue, requests in self._aside:
                for each in requests:
                    queue.add_request(each)
            self._aside.clear()
        # A decision without work may come too late, too: no step follows an answer of one token.
        now = self._decided_at = self.clock()
        if room is not None:
            self._figures["left_out"] += room.left_out
        if output.total_num_scheduled_tokens:
            self._decides_s += (now - began - self._decides_s) / 8
            self._looks -= self._looks > 0
            self._usual += ((room.given if room else 0) - self._usual) / LATE_STEPS
            self._submitted.append(_Step(self._work(output), now))
        return output

    def get_grammar_bitmask(self, output: Any, *arguments: Any, **options: Any) -> Any:
        """Return the bitmask of a step; vLLM asks for it between the two parts of each submission.

        Where the bitmask needs tokens of the running step, vLLM asks behind that step.
        """
        if not output.pending_structured_output_tokens:
            self._submits_s += (self.clock() - self._decided_at - self._submits_s) / 8
        return super().get_grammar_bitmask(output, *arguments, **options)  # type: ignore[misc]

    def update_from_output(self, output: Any, made: Any, *arguments: Any, **options: Any) -> Any:
        """Note the output of a step."""
        if output.total_num_scheduled_tokens:
            now, step = self.clock(), self._submitted.popleft()
            if self._held and now - self._decided_at < 2 * self._submits_s + SUBMITS_S / 2:
                # The step had ended before the decision that was held back for it. So its time isn't known.
                self._looks = LOOKS
            else:
                # Behind other steps, a step ends one stage after them. Alone, it passes all stages.
                took = min(now - self._ended_at, (now - step.at) / self._stages)
                error = min(abs(took - self.times.predict(step.work)), took)
                self._error_s += (error - self._error_s) / 32
                self.times.learn(step.work, took)
            self._ended_at, self._held = now, False
            for each in output.scheduled_spec_decode_tokens:
                tokens = len(made.sampled_token_ids[made.req_id_to_index[each]])
                self._per_decode += (max(tokens, 1) - self._per_decode) / 256
        return super().update_from_output(output, made, *arguments, **options)  # type: ignore[misc]

    def make_stats(self, *arguments: Any, **options: Any) -> Any:
        """Return vLLM's statistics, with the figures of this scheduler among the counts by stage."""
        stats = super().make_stats(*arguments, **options)  # type: ignore[misc]
        if stats is not None:
            stats.num_kv_fetch_reqs_by_stage |= {
                FIGURES + name: value for name, value in self.figures.items()
            }
        return stats

    @property
    def figures(self) -> dict[str, int]:
        """The figures of the scheduler: counts since the start, and learned times in µs, ns or ps.

        - `bound_us`: The longest time that the last step might take; 0: no bound was in force.
        - `left_out`: Rows that were left out of a step for time.
        - `displaced`: Rows that were preempted for live requests.
        - `malformed`: Requests with goals that are none.
        - `base_us`, `prompt_token_ns`, `sequence_ns`, `context_token_ps`: The times of `StepTimes`.
        - `steps`, `error_ppm`: The steps that it has learned from, and its mean relative error.
        """
        base, prompt, sequence, context = self.times.line
        learned = {
            "steps": self.times.steps,
            "error_ppm": self.times.error * 1e6,
            "base_us": base * 1e6,
            "prompt_token_ns": prompt * 1e9,
            "sequence_ns": sequence * 1e9,
            "context_token_ps": context * 1e12,
        }
        return self._figures | {name: round(value) for name, value in learned.items()}

    def _try_schedule_encoder_inputs(
        self, request: Any, computed: int, tokens: int, budget: float, **options: Any
    ) -> Any:
        # vLLM encodes each image whole, and takes the tokens before those that have to wait.
        room, encode = self._room, super()._try_schedule_encoder_inputs  # type: ignore[misc]
        if room is None or request.priority <= 0:
            return encode(request, computed, tokens, budget, **options)
        tokens = self._within(request, tokens)
        budget = min(budget, math.inf if room.whole else room.prompts) if room.images else 0
        found = encode(request, computed, tokens, budget, **options)
        encoded = _encoded(request, found[0])
        if found[1] + encoded > room.prompts:
            found = encode(request, computed, max(int(room.prompts - encoded), 1), budget, **options)
            encoded = _encoded(request, found[0])
        room.prompts -= encoded
        room.given += encoded
        return found

    def _mamba_block_aligned_split(self, request: Any, tokens: int, *arguments: Any) -> int:
        # The part ends with a block.
        tokens = self._within(request, tokens, whole=self.block_size)
        return int(super()._mamba_block_aligned_split(request, tokens, *arguments))  # type: ignore[misc]

    def _reserve_prefill_lookahead(self, request: Any, computed: int, tokens: int) -> int:
        """Return the tokens of a request in the step; vLLM asks this last, for each request."""
        room = self._room
        if room is None or request.priority <= 0:
            return int(super()._reserve_prefill_lookahead(request, computed, tokens))  # type: ignore[misc]
        cut = request.has_encoder_inputs or self.need_mamba_block_aligned_split
        if not cut:
            tokens = self._within(request, tokens)
        tokens = int(super()._reserve_prefill_lookahead(request, computed, tokens))  # type: ignore[misc]
        runs = request.status.name == "RUNNING"
        if not runs or request.is_prefill_chunk:
            if tokens > room.prompts:
                self._whole, room.whole = 0, False
            room.prompts -= tokens
            room.given += tokens
        if not tokens:
            room.left_out += runs and _unscheduled(request) > 0
            if not runs:
                # All that wait behind it are rows.
                self.max_num_active_reqs = 0
        return tokens

    def _within(self, request: Any, tokens: int, *, whole: float = 0) -> int:
        """Return the tokens of a request for which the step has room.

        Args:
            request: The request.
            tokens: The tokens that it would take.
            whole: Tokens of the longest part that vLLM can't cut.
        """
        room = self._room
        if room is None or request.priority <= 0 or not tokens:
            return tokens
        if request.status.name == "RUNNING" and not request.is_prefill_chunk:
            return 0 if request in room.without else tokens
        most = max(room.prompts, whole) if room.whole else room.prompts
        if tokens <= most:
            return tokens
        # vLLM fills up a decode with drafts, and expects all of them.
        return 0 if tokens <= 1 + self.num_spec_tokens else int(most)

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
        """Return the work of a step that was decided; drafts and parts of images are prompt tokens in it."""
        counts = output.num_scheduled_tokens
        context = sum(self.requests[each].num_computed_tokens for each in counts)
        encoded = sum(
            _encoded(self.requests[each], items) for each, items in output.scheduled_encoder_inputs.items()
        )
        return Work(output.total_num_scheduled_tokens - len(counts) + encoded, len(counts), context)

    def _prepare(self, now: float) -> _Room | None:
        """Make room for live requests; return the room for rows in the next step, None: it isn't bounded."""
        live = [
            each for queue in (self.kv_holding_waiting, self.waiting) for each in takewhile(_is_live, queue)
        ]
        rows = sum(each.priority > 0 for each in self.running)
        waits = len(self.waiting) + len(self.kv_holding_waiting) > len(live)
        if live or rows < len(self.running):
            self._live_until = now + LIVE_S
        if rows or not waits:
            self._row_at = now
        elif now >= self._row_at + AGING_S:
            self._promote()
            self._row_at = now
            return self._prepare(now)
        if not rows and not waits:
            return None
        # By priority, and by arrival: the youngest rows are the last ones.
        self.running.sort()
        waiting = [self._measured(each) for each in live if self._may_run(each)]
        self._displace(waiting)
        self._displace_images([*self.running, *(each.request for each in waiting)])
        if waiting and self.running:
            # vLLM begins them before all that wait without blocks. Alone, they run and free their blocks.
            self._set_aside(
                self.kv_holding_waiting,
                [each for each in self.kv_holding_waiting if each.priority > 0 and self._may_run(each)],
            )
        room = _Room()
        # They share the budget and the cache of images, and rows that run are asked first.
        room.images = not any(each.request.has_encoder_inputs for each in waiting)
        self._figures["bound_us"] = 0
        if now < self._live_until and self._may_bound and self.times.known:
            self._bound(room, waiting)
        return room

    def _set_aside(self, queue: Any, requests: list[Any]) -> None:
        """Take requests out of a queue until the step is decided."""
        queue.remove_requests(requests)
        self._aside.append((queue, requests))

    def _keep_slots(self) -> None:
        """Let no request begin whose adapter has no slot beside the adapters of all that run.

        vLLM counts the adapters of a step alone. A request that runs may be in another stage of the pipeline,
        wait for the cache of images, or be left out for time. More adapters than slots in a later step would
        end the engine.
        """
        adapters = {_adapter(each) for each in self.running} - {None}
        for queue in (self.kv_holding_waiting, self.waiting):
            late = []
            for each in queue:
                adapter = _adapter(each)
                if adapter is None or adapter in adapters:
                    continue
                if len(adapters) < self.lora_config.max_loras:
                    adapters.add(adapter)
                else:
                    late.append(each)
            if late:
                self._set_aside(queue, late)

    def _promote(self) -> None:
        """Let the first row that waits count as live."""
        queue = self.kv_holding_waiting or self.waiting
        row = next(each for each in queue if each.priority > 0)
        queue.remove_request(row)
        row.priority = 0
        queue.add_request(row)

    def _may_run(self, request: Any) -> bool:
        """Return whether a request that waits can be in the next step: its grammar and KV cache are there."""
        if request.status.name == "WAITING_FOR_REMOTE_KVS":
            return request.request_id in self.finished_recving_kv_req_ids
        if request.status.name == "WAITING_FOR_STREAMING_REQ":
            return False
        if (asked := request.structured_output_request) is None:
            return True
        return asked.grammar is not None and not isinstance(asked.grammar, Exception)

    def _measured(self, request: Any) -> _Waiting:
        """Return a waiting request, with the tokens that it has left."""
        computed, hits = request.num_computed_tokens, self.kv_cache_manager.empty_kv_cache_blocks
        if not computed:
            hits, computed, *_ = self.kv_cache_manager.get_computed_blocks(request)
        return _Waiting(request, int(request.num_tokens - computed), computed, hits)

    def _displace(self, waiting: list[_Waiting]) -> None:
        """Preempt the youngest rows, as far as live requests that wait need their places and blocks."""
        places = self._most_active - self.num_waiting_for_streaming_input - len(self.running)
        tokens, blocks = self.max_num_scheduled_tokens, 0
        for each in waiting:
            if tokens <= 0:
                break
            part = min(self._part(each.left), tokens)
            tokens -= part
            first = self._blocks(each.request, each.computed, part, each.hits)
            # vLLM begins a prompt only where all of it fits in.
            whole = self.scheduler_reserve_full_isl and self._blocks(
                each.request, each.computed, each.left, each.hits, admits=True
            )
            most = max(first, whole) + self.kv_cache_manager.watermark_blocks
            places -= 1
            while places < 0 or blocks + most > self.kv_cache_manager.block_pool.get_num_free_blocks():
                if not self._preempt_youngest():
                    break
                places += 1
            blocks += first

    def _displace_images(self, requests: list[Any]) -> None:
        """Preempt the youngest rows with images in vLLM's cache, as far as live requests need the space."""
        cache, needed = self.encoder_cache_manager, 0
        for each in requests:
            item = self._next_image(each) if _is_live(each) else None
            if item is None:
                continue
            while not cache.can_allocate(each, item, math.inf, needed):
                row = next((row for row in reversed(self.running) if cache.get_cached_input_ids(row)), None)
                if row is None or not self._preempt(row):
                    return
            needed += each.get_num_encoder_embeds(item)

    def _next_image(self, request: Any) -> int | None:
        """Return the number of the next image that vLLM has to encode for a request; None: there is none."""
        if self.is_encoder_decoder:
            # vLLM has no cache for such a model.
            return None
        cache, computed = self.encoder_cache_manager, request.num_computed_tokens
        for number, each in enumerate(request.mm_features):
            if each.mm_position.offset + each.mm_position.length > computed:
                known = cache.get_cached_num_encoder_embeds(request, number) is not None
                return None if known else number
        return None

    def _preempt_youngest(self) -> bool:
        """Preempt the youngest row; False: there is none."""
        return bool(self.running) and self._preempt(self.running[-1])

    def _preempt(self, row: Any) -> bool:
        """Preempt a running row; False: it is a live request, or it can't be preempted now."""
        if _is_live(row) or not self._request_blocks_can_be_freed(row):  # type: ignore[attr-defined]
            return False
        self.running.remove(row)
        self._preempt_request(  # type: ignore[attr-defined]
            row, time.monotonic(), drop_stale_output=self.requires_kv_delivery
        )
        self._figures["displaced"] += 1
        return True

    def _bound(self, room: _Room, waiting: list[_Waiting]) -> None:
        """Bound the rows in the next step.

        Args:
            room: The room for them.
            waiting: Live requests that wait and can run.
        """
        goals_s = [self._goal_s(each.request) for each in waiting]
        drafts = sequences = context = prompts = 0
        rows = []
        for each in self.running:
            left = _unscheduled(each)
            if _is_live(each):
                goals_s.append(self._goal_s(each))
            if left <= 0 or self.current_step + 1 < each.next_decode_eligible_step:
                # Its last step is still in the pipeline.
                continue
            if not each.is_prefill_chunk:
                drafts += left - 1
                sequences += 1
                context += each.num_computed_tokens
                if not _is_live(each):
                    rows.append(each)
            elif _is_live(each):
                prompts += self._part(left)
        prompts += sum(self._part(each.left) for each in waiting)
        usual_s = self._usual_s(Work(drafts, sequences, context))
        bound_s = min([usual_s, *filter(None, goals_s)])
        # The oldest row stays in the step.
        while len(rows) > 1 and self.times.predict(Work(drafts, sequences, context)) > bound_s:
            row = rows.pop()
            drafts -= _unscheduled(row) - 1
            sequences -= 1
            context -= row.num_computed_tokens
            room.without.add(row)
        if self._first_s:
            # A request that comes meanwhile has the same goal. Decodes of rows don't stop for it.
            bound_s = min(bound_s, self._first_s / self._steps_to_first)
        decodes = Work(drafts, sequences, context)
        space = self.times.prompt_tokens(bound_s, decodes) - prompts
        most = self.max_num_scheduled_tokens - drafts - sequences - prompts
        room.prompts = max(min(space, most), TRICKLE)
        self._whole += 1
        room.whole = self._whole >= WHOLE_STEPS
        self._figures["bound_us"] = round(bound_s * 1e6)

    def _usual_s(self, decodes: Work) -> float:
        """Return the seconds that the next step may take without goals.

        Prompts of rows are spread over the steps: a step has little more of them than the mean of late, or as
        many as double its time. A batch that has more to do raises the mean.
        """
        decodes_s = self.times.predict(decodes)
        return decodes_s + max(decodes_s, SPREAD * self._usual * self.times.per_prompt_token)

    def _goal_s(self, request: Any) -> float:
        """Return the longest step that suits a live request, in seconds; 0: it has no goal now."""
        if request.num_output_tokens or request.num_computed_tokens >= request.num_prompt_tokens:
            # A token passes the stages of a pipeline in as many steps.
            return float(request.goals_s.token_s) * self._per_decode / self._stages
        return float(request.goals_s.first_s) / self._steps_to_first

    @property
    def _steps_to_first(self) -> int:
        return STEPS_TO_FIRST + self._stages - 1

    def _adapters_crowd(self) -> bool:
        """Return whether the slots are too few for all adapters that were asked for."""
        if not self.lora_config:
            return False
        adapters = {_adapter(each) for each in self.requests.values()} - {None}
        return len(adapters) > int(self.lora_config.max_loras)

    def _part(self, tokens: int) -> int:
        """Return the tokens of a prompt that vLLM takes into a step, at most."""
        return min(tokens, self.scheduler_config.long_prefill_token_threshold or tokens)

    def _blocks(
        self, request: Any, computed: int, tokens: int, hits: Any = None, *, admits: bool = False
    ) -> int:
        """Return the blocks of the KV cache that a request takes for further tokens, as vLLM counts them.

        Args:
            request: The request.
            computed: Its tokens that are computed, hits in the prefix cache included.
            tokens: The further tokens.
            hits: Those hits; None: there are none.
            admits: Whether vLLM asks for the rest of the prompt, before it begins.
        """
        manager = self.kv_cache_manager
        lookahead = 0 if admits else self.num_lookahead_tokens
        return int(
            manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=min(computed + tokens + lookahead, self.max_model_len),
                new_computed_blocks=(hits or manager.empty_kv_cache_blocks).blocks,
                num_encoder_tokens=0,
                total_computed_tokens=computed,
                num_local_computed_tokens=computed,
                num_tokens_main_model=computed + tokens,
                apply_admission_cap=admits,
                prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
            )
        )

    def _goals(self, request: Any) -> tuple[float, float]:
        """Return the goals that the engine's client has told, in seconds; zeros if they aren't a pair."""
        params = request.sampling_params
        told = (params.extra_args or {}).get(GOALS) if params is not None else None
        match told:
            case [float(first_s), float(token_s)] if 0 <= first_s < math.inf and 0 <= token_s < math.inf:
                return first_s, token_s
        self._figures["malformed"] += told is not None
        return 0.0, 0.0


def take_figures(stats: Any) -> dict[str, int]:
    """Take the figures of `LiveFirst` out of vLLM's statistics, and return them by name."""
    counts = stats.num_kv_fetch_reqs_by_stage
    ours = [name for name in counts if name.startswith(FIGURES)]
    return {name.removeprefix(FIGURES): counts.pop(name) for name in ours}


def _is_live(request: Any) -> bool:
    return bool(request.priority <= 0)


def _unscheduled(request: Any) -> int:
    """Return the tokens of a running request that no step has yet."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)


def _encoded(request: Any, items: list[int]) -> int:
    """Return the tokens of a request's images, by their numbers."""
    return sum(int(request.get_num_encoder_embeds(each)) for each in items)


def _adapter(request: Any) -> int | None:
    return request.lora_request.lora_int_id if request.lora_request else None
