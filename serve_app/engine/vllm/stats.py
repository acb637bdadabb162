"""The statistics of vLLM: the tokens of each slot, the times of its steps, and its metrics on Ray's endpoint.

vLLM has its statistics on wherever it has a logger of them, and `EngineStats` is the one logger of an engine.
The imports are those of vLLM 0.32.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.ray_wrappers import RayGaugeWrapper, RayPrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, PromptTokenStats, SchedulerStats

from batcher import Slot
from serve_app.api.scheduling import Scheduling
from serve_app.engine.vllm.scheduler import take_figures
from serve_app.ledger.calls import CallBook
from serve_app.stats import SchedulerFigures, StepSeconds
from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram, Instrument
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import Outcome, RequestUsage, Tokens, Usage

logger = logging.getLogger("ray.serve")

PER_REQUEST = (
    "finished_requests",
    "max_num_generation_tokens_iter",
    "n_params_iter",
    "time_to_first_tokens_iter",
)
"""Lists in the statistics of a step."""

COUNTS = ("num_generation_tokens", "num_preempted_reqs", "num_corrupted_reqs")
"""Counts in the statistics of a step."""

OF_ONE_STEP = (
    "connector_prefix_cache_stats",
    "spec_decoding_stats",
    "kv_connector_stats",
    "ec_connector_stats",
    "perf_stats",
)
"""Statistics of the scheduler that can't be added up over steps."""

HISTOGRAMS = (
    "histogram_time_to_first_token",
    "histogram_request_time_per_output_token",
    "histogram_e2e_time_request",
)
"""The histograms of vLLM that are kept, by their attributes: those that the dashboard shows."""

FULL = 0.9
"""Share of the KV cache in use from which on a request is preempted for want of blocks."""

MAX_PENDING = 10_000
"""Finished requests that are kept between two reports at most."""

TOKEN_COUNTS = tuple(field.name for field in dataclasses.fields(PromptTokenStats))


def _gauge(metric: Metric) -> Instrument:
    gauge = RayGaugeWrapper(metric.name, metric.help, list(metric.labels))
    return lambda value, labels: gauge.labels(**labels).set(value)


class _Histogram:
    """A histogram with the interface that vLLM expects."""

    def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: list[float]) -> None:
        metric = Metric(name, "histogram", documentation, tuple(labelnames), tuple(map(float, buckets)))
        self._labelnames = labelnames
        self._labels: dict[str, str] = {}
        self._histogram = Histogram(metric, _gauge)
        self.report = self._histogram.report

    def labels(self, *values: Any) -> "_Histogram":
        series = copy(self)
        series._labels = dict(zip(self._labelnames, map(str, values), strict=True))
        return series

    def observe(self, value: float) -> None:
        self._histogram(value, self._labels)


class _Ignored:
    """A histogram that drops its values."""

    def observe(self, value: float) -> None:
        pass


OWN = RelayRequest("", "", b"", [], b"", Scheduling(tenant=""), source="warm_up")
"""The request of work that no client has asked for."""

slot_usage: ContextVar[Usage | None] = ContextVar("slot_usage", default=None)
"""The slot in which the requests of a task to vLLM are counted, and those of tasks that it starts."""


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
    """The sequences of one request of vLLM; their counts are those of vLLM's output processor.

    vLLM adds the tokens of a step to its counters and to the sequence's own statistics in one place. It adds
    a prompt with the first tokens of a sequence, or with the result of a pooling model. A sequence that is
    aborted before leaves its prompt uncounted in both. Work that is done again after a preemption isn't
    counted again. vLLM forgets a sequence that ends, so its state is kept here; it is only read.

    The answers to one prompt share it. So it counts once here, as in the `usage` of the answer, with the
    cached tokens of the first answer that has it; vLLM's counters have it for each answer.

    Args:
        processor: vLLM's output processor.
        request_id: vLLM's own id of the request.

    Raises:
        RuntimeError: vLLM keeps the state of its requests elsewhere by now.
    """

    __slots__ = ("_first", "_known", "_states")

    def __init__(self, processor: Any, request_id: str) -> None:
        try:
            parent = processor.parent_requests.get(request_id)
            ids = [request_id] if parent is None else list(parent.child_requests)
            self._known: dict[str, Any] = processor.request_states
            self._states = [self._known[each] for each in ids]
            self._first: Any = None
            self.tokens()
        except (AttributeError, LookupError, TypeError) as error:
            raise RuntimeError(
                f"vLLM's state of a request isn't where vLLM 0.32 has it: {error!r}"
            ) from error

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

    Attributes:
        last: The last output of vLLM.
    """

    __slots__ = ("_began_at", "_own", "last")

    def __init__(self, usage: RequestUsage, slot: Slot) -> None:
        self._began_at = usage.now()
        self._own = usage.begin(slot)
        # The engine has the tokens of an answer that comes as a whole long before its end.
        slot.follow(self._own.produced)
        self.last: Any = None

    def __enter__(self) -> Self:
        # vLLM adds the sequences in this task, before it does anything else.
        slot_usage.set(self._own)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if metrics := getattr(self.last, "metrics", None):
            self._own.events = self._events(metrics)
        # The sequences have ended before: their generator is closed first.
        self._own.end(self._outcome(kind))

    def _events(self, metrics: Any) -> Sequence[tuple[str, float]]:
        """Return when vLLM did what; EngineCore's monotonic clock is that of this machine too."""
        # This process notes its own times by the wall clock.
        received_at = metrics.arrival_time + metrics.first_token_latency - time.time() + time.monotonic()
        times = (
            ("tokenized", self._began_at),
            ("queued", metrics.queued_ts),
            ("scheduled", metrics.scheduled_ts),
            ("first token", metrics.first_token_ts),
            ("received", received_at if metrics.first_token_latency else 0.0),
        )
        return [(name, at) for name, at in times if at]

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
        step_s=StepSeconds(
            base=figures["base_us"] / 1e6,
            prompt_token=figures["prompt_token_ns"] / 1e9,
            sequence=figures["sequence_ns"] / 1e9,
            context_token=figures["context_token_ps"] / 1e12,
        ),
    )


class EngineStats(RayPrometheusStatLogger):  # type: ignore[misc]
    """The statistics of an engine: counts, the times of its steps, and vLLM's metrics through Ray.

    vLLM reports some twenty values per step and one per token, and each takes Ray 3 µs. Here a step is only
    added to those before it, and `flush` reports them together. Most of vLLM's histograms, 16 values per
    request, are left out.

    An error that left `record` would end vLLM's client for good; it ends a part of the statistics instead.

    Args:
        vllm_config: vLLM's configuration.
        engine_indexes: vLLM's numbers of the engines.

    Attributes:
        reported: Whether vLLM's metrics go to Ray's endpoint.
        steps: Messages of the engine so far: there is one every few steps at least, see `HeldTokens`.
        prompt: Prompt tokens that vLLM has counted since the start.
        output: Tokens that were sampled since the start.
        preempted: Called with the requests that were preempted while the KV cache was full.
        scheduler: The last figures of `LiveFirst`, by name; empty: the scheduler is vLLM's own.
    """

    _histogram_cls = _Histogram
    reported = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_indexes: list[int] | None = None,
    ) -> None:
        self.steps = 0
        self.prompt = 0
        self.output = 0
        self.preempted: Callable[[int], None] = lambda requests: None
        self.scheduler: dict[str, int] = {}
        self._failed: set[str] = set()
        if not self.reported:
            return
        super().__init__(vllm_config, engine_indexes)
        for name in [name for name in vars(self) if name.startswith("histogram_")]:
            if name not in HISTOGRAMS:
                setattr(self, name, dict.fromkeys(engine_indexes or [0], _Ignored()))
        self._schedulers = {index: SchedulerStats() for index in engine_indexes or [0]}
        self._caches = {index: PrefixCacheStats() for index in self._schedulers}
        self._iterations: dict[int, IterationStats] = {}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add a message of an engine: the statistics of a step, or of several."""
        self.steps += 1
        if scheduler_stats is not None:
            self._guard("figures", self._take_figures, scheduler_stats)
        if iteration_stats is not None:
            self._guard("counts", self._count, scheduler_stats, iteration_stats)
        if self.reported:
            self._guard("metrics", self._add, engine_idx, scheduler_stats, iteration_stats)

    def flush(self) -> None:
        """Report vLLM's metrics of the steps since the last call, and the current state."""
        if self.reported:
            self._guard("metrics", self._report)

    def _guard(self, part: str, work: Callable[..., None], *args: Any) -> None:
        if part in self._failed:
            return
        try:
            work(*args)
        except Exception:
            self._failed.add(part)
            logger.exception("vLLM's statistics fail: their %s are left out from now on", part)

    def _take_figures(self, scheduler: SchedulerStats) -> None:
        self.scheduler = take_figures(scheduler) or self.scheduler

    def _count(self, scheduler: SchedulerStats | None, step: IterationStats) -> None:
        self.prompt += step.num_prompt_tokens
        self.output += step.num_generation_tokens
        if step.num_preempted_reqs and scheduler is not None and scheduler.kv_cache_usage >= FULL:
            # With a cache that isn't full, a live request took the place of a row.
            self.preempted(step.num_preempted_reqs)

    def _add(self, index: int, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        if iteration is not None:
            self._add_iteration(index, iteration)
        if scheduler is not None:
            self._add_scheduler(index, scheduler)

    def _report(self) -> None:
        for index, scheduler in self._schedulers.items():
            cache, self._caches[index] = self._caches[index], PrefixCacheStats()
            step = dataclasses.replace(scheduler, prefix_cache_stats=cache)
            super().record(step, self._iterations.pop(index, None), None, index)
            # Counts are reported once.
            once = dict.fromkeys(OF_ONE_STEP) | {"kv_cache_eviction_events": []}
            self._schedulers[index] = dataclasses.replace(scheduler, **once)
        for name in HISTOGRAMS:
            # The histogram of one engine has the series of all.
            next(iter(getattr(self, name).values())).report()

    def _add_scheduler(self, index: int, step: SchedulerStats) -> None:
        # vLLM's own loggers read the step too: it isn't changed.
        self._schedulers[index] = step
        cache = self._caches[index]
        cache.queries += step.prefix_cache_stats.queries
        cache.hits += step.prefix_cache_stats.hits
        if step.kv_cache_eviction_events or any(getattr(step, name) for name in OF_ONE_STEP):
            self._report()

    def _add_iteration(self, index: int, step: IterationStats) -> None:
        total = self._iterations.get(index)
        if total is None:
            total = self._iterations[index] = IterationStats()
        for name in PER_REQUEST:
            if items := getattr(step, name):
                getattr(total, name).extend(items)
        for name in COUNTS:
            setattr(total, name, getattr(total, name) + getattr(step, name))
        tokens = step.prompt_token_stats
        if tokens.total:
            sums = total.prompt_token_stats
            for name in TOKEN_COUNTS:
                setattr(sums, name, getattr(sums, name) + getattr(tokens, name))
        if len(total.finished_requests) >= MAX_PENDING:
            self._report()


class UnreportedStats(EngineStats):
    """The statistics of an engine whose metrics stay off Ray's endpoint.

    It derives from vLLM's logger for Prometheus all the same: without one, vLLM adds its own.
    """

    reported = False

    def record_admission_rejection(self, reason: str) -> None:
        """Do nothing: vLLM calls it."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Do nothing: vLLM calls it."""

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls it."""
