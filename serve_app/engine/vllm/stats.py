"""The statistics of vLLM: the tokens of each slot, the figures of its scheduler, and its metrics.

vLLM has its statistics on wherever it has a logger of them, and `EngineStats` is the one logger of an engine.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from batcher import Slot
from serve_app.api.scheduling import Scheduling
from serve_app.engine.vllm.scheduler import take_figures
from serve_app.engine.vllm.seams import RayKVConnectorProm
from serve_app.ledger.calls import CallBook
from serve_app.stats import SchedulerFigures, StepSeconds
from serve_app.telemetry import catalogue
from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.meters import Meters
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import Outcome, RequestUsage, Tokens, Usage

logger = logging.getLogger("ray.serve")

FULL = 0.9
"""Share of the KV cache in use from which on a request is preempted for want of blocks."""

OWN = RelayRequest("", "", b"", [], b"", Scheduling(tenant=""), source="warm_up")
"""The request of work that no client has asked for."""

slot_usage: ContextVar[Usage | None] = ContextVar("slot_usage", default=None)
"""The slot that counts a task's requests to vLLM, and the requests of tasks that it starts."""


@contextmanager
def own_work(book: CallBook) -> Iterator[None]:
    """Count the requests of a block as work of the replica itself, such as the warm-up; it has no slot.

    Args:
        book: Gets the work.
    """
    usage = RequestUsage()
    with book.open(OWN, usage):
        slot = usage.begin()
        token = slot_usage.set(slot)
        try:
            yield
        finally:
            slot_usage.reset(token)
            slot.end()


class VLLMSequences:
    """The sequences of one request of vLLM; their counts come from vLLM's output processor.

    vLLM adds the tokens of a step to its counters and to the sequence's own statistics in one place. It adds
    a prompt with the first tokens of a sequence, or with the result of a pooling model. A sequence that is
    aborted before leaves its prompt uncounted in both. Work that is done again after a preemption isn't
    counted again. vLLM forgets a sequence that ends, so its state is kept here; it is only read.

    The answers to one prompt share it. So it counts once here, as in the `usage` of the answer, with the
    cached tokens of the first answer that has it; vLLM's counters have it for each answer.

    Args:
        processor: vLLM's output processor.
        request_id: vLLM's own id of the request.
    """

    __slots__ = ("_first", "_known", "_states")

    def __init__(self, processor: Any, request_id: str) -> None:
        parent = processor.parent_requests.get(request_id)
        ids = [request_id] if parent is None else list(parent.child_requests)
        self._known: dict[str, Any] = processor.request_states
        self._states = [self._known[each] for each in ids]
        self._first: Any = None

    def tokens(self) -> Tokens:
        """Return what vLLM has counted so far."""
        total = 0
        for state in self._states:
            output = state.stats.num_generation_tokens
            total += output
            if self._first is None and not state.is_prefilling and (output or state.detokenizer is None):
                self._first = state
        first = self._first
        return (
            Tokens(0, 0, total) if first is None else Tokens(first.prompt_len, first.num_cached_tokens, total)
        )

    def ended(self) -> bool:
        """Return whether vLLM has forgotten the sequences."""
        return all(self._known.get(state.request_id) is not state for state in self._states)


class CountedLLM(AsyncLLM):  # type: ignore[misc]
    """An `AsyncLLM` that counts the tokens of each request in the slot of its task; see `slot_usage`."""

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        # A client's claim of the tokens that another engine had in its cache, which vLLM would believe.
        transfer = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
        if isinstance(transfer, dict):
            transfer.pop("remote_prefill_cached_tokens", None)
        queue = await super().add_request(request_id, prompt, params, *args, **options)
        try:
            slot = slot_usage.get()
            if slot is None:
                raise RuntimeError(f"request {request_id} came to the engine without a slot")
            slot.count(VLLMSequences(self.output_processor, queue.request_id))
        except BaseException:
            await self.abort(queue.request_id, internal=True)
            raise
        return queue


class CountedPrompt:
    """The count of one prompt in its slot, from the start of the slot to its end.

    Args:
        usage: The usage of its request.
        slot: Its slot, which has started.
        searches: Whether it gets a beam search; see `Usage`.

    Attributes:
        last: The last output of vLLM.
    """

    __slots__ = ("_own", "last")

    def __init__(self, usage: RequestUsage, slot: Slot, *, searches: bool = False) -> None:
        self._own = usage.begin(slot)
        self._own.searches = searches
        # The engine has the tokens of an answer that comes as a whole long before its end.
        slot.follow(self._own.produced)
        self.last: Any = None

    def __enter__(self) -> Self:
        # vLLM adds the sequences in this task, before it does anything else.
        slot_usage.set(self._own)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The sequences have ended before: their generator is closed first.
        self._own.end(self._outcome(kind))

    def _outcome(self, error: type[BaseException] | None) -> Outcome:
        # A reader may leave the last output without waiting for the end.
        if error is None or (self.last is not None and self.last.finished):
            return "ok"
        if issubclass(error, (asyncio.CancelledError, GeneratorExit)):
            return "cancelled"
        return "lost" if issubclass(error, EngineDeadError) else "failed"


def scheduler_figures(figures: Mapping[str, int]) -> SchedulerFigures:
    """Return the figures of `LiveFirst` as `/stats` has them."""
    return SchedulerFigures(
        bound_s=figures["bound_us"] / 1e6 or None,
        left_out=figures["left_out"],
        displaced=figures["displaced"],
        malformed=figures["malformed"],
        steps=figures["steps"],
        step_error=figures["error_ppm"] / 1e6,
        step_s=StepSeconds(
            base=figures["base_us"] / 1e6,
            prompt_token=figures["prompt_token_ns"] / 1e9,
            sequence=figures["sequence_ns"] / 1e9,
            context_token=figures["context_token_ps"] / 1e12,
        ),
    )


class EngineStats(StatLoggerBase):  # type: ignore[misc]
    """The statistics of an engine: counts, the times of its requests, and the metrics of vLLM.

    vLLM reports some twenty values per step and one per token, and each takes Ray 3 µs. Here a step is only
    added to the counts, and `report` exports them.

    An error that left `record` would end vLLM's client for good; it ends a part of the statistics instead.

    Args:
        model: Id of the model, for labels.
        meters: Instruments of `catalogue.VLLM`; None: the metrics stay off Ray's endpoint.

    Attributes:
        steps: Messages of the engine so far: there is one every few steps at least, see `HeldTokens`.
        preempted: Called with the requests that were preempted while the KV cache was full.
        scheduler: The last figures of `LiveFirst`, by name; empty: the scheduler is vLLM's own.
    """

    def __init__(self, model: str, meters: Meters | None = None) -> None:
        self.steps = 0
        self.preempted: Callable[[int], None] = lambda requests: None
        self.scheduler: dict[str, int] = {}
        self._model = model
        self._meters = meters
        self._connector: Any = None
        self._gauges: dict[Metric, float] = {}
        self._counts: Counter[Metric] = Counter()
        self._failed: set[str] = set()

    def join(self, vllm_config: VllmConfig, engine_index: int) -> Self:
        """Take part in an engine that starts: vLLM calls this as the factory of its logger."""
        if self._meters is not None:
            # The metrics of connectors differ, and each has its own class for them.
            labels = {engine_index: [self._model, str(engine_index)]}
            self._connector = RayKVConnectorProm(vllm_config, ["model_name", "engine"], labels)
        return self

    @property
    def prompt(self) -> int:
        """Prompt tokens that vLLM has counted since the start."""
        return self._counts[catalogue.VLLM_PROMPT_TOKENS]

    @property
    def output(self) -> int:
        """Tokens that were sampled since the start."""
        return self._counts[catalogue.VLLM_OUTPUT_TOKENS]

    @property
    def preemptions(self) -> int:
        """Sequences that were preempted and computed again since the start."""
        return self._counts[catalogue.VLLM_PREEMPTIONS]

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add a message of an engine: the statistics of a step, or of several."""
        self.steps += 1
        if iteration_stats is not None:
            self._guard("counts", self._count, scheduler_stats, iteration_stats)
        if scheduler_stats is not None:
            self._guard("figures", self._take, scheduler_stats, engine_idx)

    def report(self) -> None:
        """Export the metrics."""
        if self._meters is None:
            return
        for gauge, value in self._gauges.items():
            self._meters.record(gauge, value, self._model)
        for counter, total in self._counts.items():
            self._meters.count(counter, total, self._model)
        self._meters.report()

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls it."""

    def _guard(self, part: str, work: Callable[..., None], *args: Any) -> None:
        if part in self._failed:
            return
        try:
            work(*args)
        except Exception:
            self._failed.add(part)
            logger.exception("vLLM's statistics fail: their %s are left out from now on", part)

    def _take(self, stats: SchedulerStats, index: int) -> None:
        """Take the state of the scheduler, and the counts of its caches and drafts."""
        self.scheduler = take_figures(stats) or self.scheduler
        self._gauges = {
            catalogue.VLLM_RUNNING: stats.num_running_reqs,
            catalogue.VLLM_WAITING: stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            catalogue.VLLM_CACHE_USED: stats.kv_cache_usage,
        }
        counts = self._counts
        counts[catalogue.VLLM_CACHE_QUERIES] += stats.prefix_cache_stats.queries
        counts[catalogue.VLLM_CACHE_HITS] += stats.prefix_cache_stats.hits
        if (external := stats.connector_prefix_cache_stats) is not None:
            counts[catalogue.VLLM_EXTERNAL_QUERIES] += external.queries
            counts[catalogue.VLLM_EXTERNAL_HITS] += external.hits
        if (drafts := stats.spec_decoding_stats) is not None:
            counts[catalogue.VLLM_DRAFTS] += drafts.num_drafts
            counts[catalogue.VLLM_DRAFT_TOKENS] += drafts.num_draft_tokens
            counts[catalogue.VLLM_ACCEPTED_TOKENS] += drafts.num_accepted_tokens
        if stats.kv_connector_stats is not None and self._connector is not None:
            self._connector.observe(stats.kv_connector_stats, index)

    def _count(self, scheduler: SchedulerStats | None, step: IterationStats) -> None:
        """Count the tokens of a step, and note the times of its requests."""
        counts = self._counts
        counts[catalogue.VLLM_PROMPT_TOKENS] += step.num_prompt_tokens
        counts[catalogue.VLLM_OUTPUT_TOKENS] += step.num_generation_tokens
        counts[catalogue.VLLM_PREEMPTIONS] += step.num_preempted_reqs
        if step.num_preempted_reqs and scheduler is not None and scheduler.kv_cache_usage >= FULL:
            # With a cache that isn't full, a live request took the place of a row.
            self.preempted(step.num_preempted_reqs)
        if self._meters is None:
            return
        for first_s in step.time_to_first_tokens_iter:
            self._meters.record(catalogue.VLLM_FIRST_TOKEN, first_s, self._model)
        for request in step.finished_requests:
            self._meters.record(catalogue.VLLM_PER_TOKEN, request.mean_time_per_output_token, self._model)
            self._meters.record(catalogue.VLLM_SECONDS, request.e2e_latency, self._model)
