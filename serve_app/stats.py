"""The schema of `/stats` and `/health`: the service writes them; `top`, the page, `tune` and runs read them.

A value of another form, as a service of another version may send it, is read as None, so that the rest is
usable.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from batcher import BatchStats, ContinuousStats
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import tier

ValueT = TypeVar("ValueT")


def _or_none(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


Maybe = Annotated[ValueT | None, WrapValidator(_or_none)]
"""A value, or None where it has another form."""


class StatsPart(BaseModel):
    """A part of the statistics."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def body(self) -> JSON:
        """Return the part as JSON, without the fields that were not set."""
        return self.model_dump(mode="json", exclude_unset=True)


class Use(StatsPart):
    """Calls and tokens of a tenant in a replica, since the start of the replica."""

    calls: int = Field(default=0, description="Calls that have ended.")
    prompt: int = Field(default=0, description="Tokens of prompts.")
    cached: int = Field(default=0, description="Tokens of prompts that were in the prefix cache.")
    output: int = Field(default=0, description="Tokens of answers.")
    cost: int = Field(default=0, description="Cost of the records of a function.")
    tokens_per_s: Maybe[float] = Field(default=None, description="Tokens of prompts and answers, per second.")

    def plus(self, other: "Use") -> "Use":
        """Return the sums of both."""
        return Use(
            calls=self.calls + other.calls,
            prompt=self.prompt + other.prompt,
            cached=self.cached + other.cached,
            output=self.output + other.output,
            cost=self.cost + other.cost,
            tokens_per_s=_sum((self.tokens_per_s, other.tokens_per_s)),
        )


class EngineTokens(StatsPart):
    """Counts of the engine since its start, step by step."""

    prompt: int = Field(default=0, description="Tokens of prompts.")
    output: int = Field(default=0, description="Tokens of answers.")
    preempted: int = Field(default=0, description="Sequences that were preempted and computed again.")


class Rates(StatsPart):
    """Rates of a replica, over the last two to three seconds."""

    over_s: float = Field(default=0.0, description="Seconds that the rates are taken over.")
    requests_per_s: float = Field(default=0.0, description="Completed requests per second.")
    prompt_tokens_per_s: Maybe[float] = Field(
        default=None, description="Tokens of prompts per second; null: a function."
    )
    output_tokens_per_s: Maybe[float] = Field(
        default=None, description="Tokens of answers per second; null: a function."
    )
    busy: float = Field(default=0.0, description="Share of the time, 0 to 1, in which a request ran.")


class ReplicaUsage(StatsPart):
    """Usage of a replica since its start."""

    tenants: Maybe[dict[str, Maybe[Use]]] = Field(default=None, description="By tenant.")
    own: Maybe[Use] = Field(
        default=None, description="Work that no client has asked for, such as the warm-up."
    )
    engine: Maybe[EngineTokens] = Field(
        default=None, description="Tokens as the engine counts them, for a comparison."
    )


class Turn(StatsPart):
    """The turn of a replica whose model shares its device with others."""

    group: str = Field(default="", description="`share` of the models.")
    state: str = Field(
        default="", description="`starting`, `loading`, `awake`, `draining`, `asleep`, `waking` or `failed`."
    )
    turns: int = Field(default=0, description="Turns that have begun.")
    sleep_s: float = Field(default=0.0, description="Seconds that falling asleep took the last time.")
    wake_s: float = Field(default=0.0, description="Seconds that waking up took the last time.")
    cause: str = Field(default="", description="Why the model can't be used; empty: it can.")


class AdapterState(StatsPart):
    """A LoRA adapter in a replica."""

    id: str = Field(description="The name that clients put in `model`.")
    root: str = Field(default="", description="Its source.")
    declared: bool = Field(default=False, description="Whether the config names it.")
    resident: bool = Field(default=False, description="Whether it is on the device now.")


class GoalsInForce(StatsPart):
    """The latency goals in force."""

    ttft_p99_s: Maybe[float] = Field(default=None, description="Seconds to the first token.")
    tpot_p99_s: Maybe[float] = Field(default=None, description="Seconds per token after it.")


class StepSeconds(StatsPart):
    """The times of a step, as an engine has learned them, in seconds."""

    base: float = Field(default=0.0, description="Of each step.")
    prompt_token: float = Field(default=0.0, description="Per token of a prompt.")
    sequence: float = Field(default=0.0, description="Per sequence.")
    context_token: float = Field(default=0.0, description="Per token of context that is read.")


class SchedulerFigures(StatsPart):
    """The figures of an engine's scheduler: rows that gave way since the start, and learned times."""

    bound_s: Maybe[float] = Field(
        default=None, description="Maximum seconds that the last step might take; null: it was not bounded."
    )
    left_out: int = Field(default=0, description="Rows left out of a step for time.")
    displaced: int = Field(default=0, description="Rows preempted for live requests.")
    malformed: int = Field(default=0, description="Requests whose goals were none.")
    step_s: StepSeconds = Field(default=StepSeconds(), description="The times of a step.")
    steps: int = Field(default=0, description="Steps that these times are learned from.")
    step_error: float = Field(default=0.0, description="Mean relative error of the times of the last steps.")

    @property
    def least_s(self) -> float:
        """The smallest goal that a stage can meet, in seconds: two steps of a sequence; 0: not known yet."""
        return 2 * (self.step_s.base + self.step_s.sequence)


def _kind(stats: Any) -> str:
    window = isinstance(stats, ContinuousStats) or (isinstance(stats, Mapping) and "capacity" in stats)
    return "continuous" if window else "batch"


BatcherStats = Annotated[
    Annotated[ContinuousStats, Tag("continuous")] | Annotated[BatchStats, Tag("batch")], Discriminator(_kind)
]
"""The statistics of a replica's batcher; the README of `batcher` has their fields."""


class ReplicaStats(StatsPart):
    """One replica of a model."""

    replica: Maybe[str] = Field(default=None, description="Its id in Ray Serve.")
    max_model_len: Maybe[int] = Field(default=None, description="Context of the model, in tokens.")
    max_num_batched_tokens: Maybe[int] = Field(default=None, description="Maximum tokens in a step.")
    load_s: Maybe[float] = Field(
        default=None, description="Seconds that the engine took to load the model, with its warm-up."
    )
    goals: Maybe[GoalsInForce] = Field(default=None, description="Latency goals; null: none.")
    scheduler: Maybe[SchedulerFigures] = Field(default=None, description="Its scheduler; null: vLLM's own.")
    usage: Maybe[ReplicaUsage] = Field(default=None, description="Its use since its start.")
    rates: Maybe[Rates] = Field(default=None, description="Its rates.")
    adapters: Maybe[list[Maybe[AdapterState]]] = Field(default=None, description="LoRA adapters.")
    turn: Maybe[Turn] = Field(default=None, description="For a model that shares its device.")
    batcher: Maybe[BatcherStats] = Field(
        default=None, description="The queue and the running requests; see the README of `batcher`."
    )

    @property
    def window(self) -> ContinuousStats | None:
        """The batcher of a language model; None: the model is a function, or its statistics are missing."""
        return self.batcher if isinstance(self.batcher, ContinuousStats) else None


class Total(StatsPart):
    """Replicas together. Counts and rates are sums, percentiles are the percentiles of the slowest replica.

    A field is null where it is unknown, or where the model has no such thing.
    """

    running: int | None = Field(default=None, description="Running requests; for a function, records.")
    max_running: int | None = Field(default=None, description="Maximum requests that may run at once.")
    background_running: int | None = Field(default=None, description="Running requests of tier `flex`.")
    waiting: int | None = Field(default=None, description="Waiting requests.")
    waiting_by_tier: dict[str, int] = Field(
        default_factory=dict, description="Waiting requests by service tier, without empty tiers."
    )
    kv_tokens: int | None = Field(
        default=None, description="Tokens of KV cache that are reserved for running requests and answers."
    )
    kv_capacity: int | None = Field(default=None, description="Tokens of KV cache.")
    kv_used: float | None = Field(default=None, description="The share of both, 0 to 1.")
    busy: float | None = Field(
        default=None, description="Share of the time in which a request ran, 0 to 1; mean of the replicas."
    )
    requests_per_s: float | None = Field(default=None, description="Completed requests per second.")
    prompt_tokens_per_s: float | None = Field(default=None, description="Tokens of prompts per second.")
    output_tokens_per_s: float | None = Field(default=None, description="Tokens of answers per second.")
    tpot_s: float | None = Field(
        default=None, description="Seconds between two tokens of a running request, by both rates."
    )
    ttft_p50_s: float | None = Field(
        default=None,
        description="Seconds from a request's arrival in a replica to its first token, of its last 512 "
        "streams: median.",
    )
    ttft_p99_s: float | None = Field(default=None, description="The same: 99th percentile.")
    wait_p50_s: float | None = Field(
        default=None, description="Seconds in the queue, of the last 512 requests: median."
    )
    wait_p99_s: float | None = Field(default=None, description="The same: 99th percentile.")
    run_p50_s: float | None = Field(
        default=None, description="Seconds from start to end, of the last 512 requests: median."
    )
    run_p99_s: float | None = Field(default=None, description="The same: 99th percentile.")
    batch_size: float | None = Field(default=None, description="Records of a function's batch: mean.")
    padding: float | None = Field(
        default=None, description="Share of the cost of a function's batches that is padding."
    )
    goals: GoalsInForce | None = Field(default=None, description="Latency goals in force.")
    bound_s: float | None = Field(
        default=None, description="Maximum seconds that a step may take now: the least of the replicas."
    )
    preempted: int | None = Field(
        default=None, description="Sequences that were preempted and computed again, since the start."
    )
    completed: int | None = Field(default=None, description="Completed requests since the start.")
    failed: int | None = Field(default=None, description="Failed requests.")
    cancelled: int | None = Field(default=None, description="Cancelled requests.")
    expired: int | None = Field(default=None, description="Requests whose time in the queue was over.")
    rejected: int | None = Field(default=None, description="Rejected requests.")
    tenants: dict[str, Use] = Field(default_factory=dict, description="Use since the start, by tenant.")


def total_of(replicas: Sequence[ReplicaStats]) -> Total:
    """Return the figures of replicas together."""
    batchers = [one.batcher for one in replicas if one.batcher is not None]
    windows = [one for one in batchers if isinstance(one, ContinuousStats)]
    batches = [one for one in batchers if isinstance(one, BatchStats)]
    rates = [one.rates for one in replicas if one.rates is not None]
    engines = [one.usage.engine for one in replicas if one.usage and one.usage.engine]
    running = _sum(one.running for one in batchers)
    used, capacity = _sum(one.running_cost for one in windows), _sum(one.capacity for one in windows)
    output = _sum(one.output_tokens_per_s for one in rates)
    # If a replica has no bound, the sum of the bounds is meaningless.
    is_bounded = all(one.max_running is not None for one in windows)
    many = sum(one.total_batches for one in batches)
    bounds = [one.scheduler.bound_s for one in replicas if one.scheduler and one.scheduler.bound_s]
    tiers: dict[str, int] = {}
    for one in batchers:
        for priority, (records, _) in one.queue_classes.items():
            # A priority of another version may have no name here.
            with suppress(LookupError, ValueError):
                if records:
                    tiers[tier(priority)] = tiers.get(tier(priority), 0) + records
    return Total(
        running=running,
        max_running=_sum(one.max_running for one in windows) if is_bounded else None,
        background_running=_sum(one.background_running for one in windows),
        waiting=_sum(one.queue_depth for one in batchers),
        waiting_by_tier=tiers,
        kv_tokens=used,
        kv_capacity=capacity,
        kv_used=used / capacity if capacity else None,
        busy=sum(one.busy for one in rates) / len(rates) if rates else None,
        requests_per_s=_sum(one.requests_per_s for one in rates),
        prompt_tokens_per_s=_sum(one.prompt_tokens_per_s for one in rates),
        output_tokens_per_s=output,
        tpot_s=running / output if running and output else None,
        ttft_p50_s=_largest(one.ttft_p50_s for one in windows),
        ttft_p99_s=_largest(one.ttft_p99_s for one in windows),
        wait_p50_s=_largest(one.wait_p50_s for one in batchers),
        wait_p99_s=_largest(one.wait_p99_s for one in batchers),
        run_p50_s=_largest(one.run_p50_s for one in batchers),
        run_p99_s=_largest(one.run_p99_s for one in batchers),
        batch_size=sum(one.avg_batch_size * one.total_batches for one in batches) / many if many else None,
        padding=_largest(one.padding_ratio for one in batches),
        goals=next((one.goals for one in replicas if one.goals), None),
        bound_s=min(bounds, default=None),
        preempted=_sum(one.preempted for one in engines),
        completed=_sum(one.total_completed for one in batchers),
        failed=_sum(one.total_failed for one in batchers),
        cancelled=_sum(one.total_cancelled for one in batchers),
        expired=_sum(one.total_expired for one in batchers),
        rejected=_sum(one.total_rejected for one in batchers),
        tenants=uses_of((one.usage.tenants or {}) for one in replicas if one.usage),
    )


def uses_of(parts: Iterable[Mapping[str, Use | None]]) -> dict[str, Use]:
    """Return the sums of the use of tenants."""
    sums: dict[str, Use] = {}
    for part in parts:
        for name, use in part.items():
            if use is not None:
                sums[name] = sums[name].plus(use) if name in sums else use
    return sums


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of the known values; None: none is known."""
    known = [one for one in values if one is not None]
    return sum(known) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((one for one in values if one is not None), default=None)


class ModelStats(StatsPart):
    """All replicas of a model."""

    state: Maybe[str] = Field(
        default=None,
        description="`ready`, `starting`, `asleep` (scaled to zero, or until its turn), `failed` or `error`.",
    )
    detail: Maybe[str] = Field(default=None, description="The reason for another state than `ready`.")
    simulated: Maybe[str] = Field(default=None, description="Profile of its simulated device.")
    ready_replicas: Maybe[int] = Field(
        default=None, description="Replicas that can serve, as Ray Serve counts them."
    )
    total: Maybe[Total] = Field(default=None, description="Its replicas together.")
    replicas: list[ReplicaStats] = Field(description="The replicas that answered.")
    error: Maybe[str] = Field(default=None, description="Why the replicas could not be asked, if so.")


class RowCounts(StatsPart):
    """Rows of the open batches."""

    waiting: int = Field(default=0, description="Waiting rows.")
    in_flight: int = Field(default=0, description="Rows that were sent and are not answered yet.")
    completed: int = Field(default=0, description="Rows with a result since the start of the replica.")
    failed: int = Field(default=0, description="Failed rows since the start of the replica.")


class BatchesStats(StatsPart):
    """Files and batches."""

    batches: dict[str, int] = Field(default_factory=dict, description="Open batches by state.")
    rows: RowCounts = Field(default_factory=RowCounts, description="Rows of the open batches.")
    rows_in_flight_limit: int = Field(default=0, description="Rows that may be in flight now.")
    rows_per_s: float = Field(default=0.0, description="Rows per second.")
    eta_s: float | None = Field(default=None, description="Seconds that the open batches take at this rate.")
    oldest_s: int = Field(default=0, description="Seconds since the oldest open batch was created.")
    late: int = Field(
        default=0, description="Open batches that will miss their window at the rate of the last hour."
    )
    files: int = Field(default=0, description="Files of all tenants.")
    bytes: int = Field(default=0, description="Bytes of these files.")
    error: str = Field(default="", description="Why the statistics are missing, if they are.")


class LimitStats(StatsPart):
    """One limit of a quota, in the current window."""

    limit: int | float = Field(description="Most that may be used.")
    remaining: int | float = Field(description="Amount that is left.")
    reserved: int | float = Field(description="Amount that running requests may still use.")
    ends_in_s: float | None = Field(
        default=None, description="Seconds to the end of the window; null: no end."
    )


class QuotasStats(StatsPart):
    """The quotas of keys and tenants."""

    holders: int = Field(default=0, description="Replicas that report their usage.")
    limits: dict[str, dict[str, LimitStats]] = Field(
        default_factory=dict, description="By `key NAME` or `tenant NAME`, and by name of the limit."
    )
    error: str = Field(default="", description="Why the statistics are missing, if they are.")


class ServiceStats(StatsPart):
    """The answer to `GET /stats`."""

    models: dict[str, ModelStats] = Field(description="By id of the model.")
    tenants: Maybe[dict[str, Use]] = Field(
        default=None, description="Use of all models since their replicas started, by tenant."
    )
    batches: Maybe[BatchesStats] = Field(default=None, description="Files and batches, where they are on.")
    quotas: Maybe[QuotasStats] = Field(default=None, description="Quotas, where they are on.")

    def model_or_base(self, name: str | None) -> ModelStats | None:
        """Return a model, or the model of an adapter.

        Args:
            name: Its id; None: the first model.
        """
        if name is None:
            return next(iter(self.models.values()), None)
        if name in self.models:
            return self.models[name]
        for model in self.models.values():
            adapters = [one for replica in model.replicas for one in replica.adapters or ()]
            if any(one is not None and one.id == name for one in adapters):
                return model
        return None


class ModelHealth(StatsPart):
    """The health of a model."""

    state: Maybe[str] = Field(default=None, description="`ready`, `asleep` (scaled to zero) or `starting`.")
    replicas: Maybe[int] = Field(default=None, description="Replicas that can serve.")
    simulated: Maybe[str] = Field(default=None, description="Profile of its simulated device.")
    awaits: Maybe[str] = Field(default=None, description="What is missing, in Ray Serve's words.")


class ServiceHealth(StatsPart):
    """The answer to `GET /health`."""

    status: Maybe[str] = Field(
        default=None,
        description="`ok` if all models are ready, `partial` if some are, `starting`, or `unknown`.",
    )
    models: Maybe[dict[str, Maybe[ModelHealth]]] = Field(default=None, description="By id of the model.")
    awaits: Maybe[str] = Field(default=None, description="What doesn't answer, if the status is unknown.")

    def model(self, id: str) -> ModelHealth:
        """Return the health of a model; empty if it isn't reported."""
        return (self.models or {}).get(id) or ModelHealth()


def replica_body(replica: str, stats: ContinuousStats | BatchStats, **more: Any) -> JSON:
    """Return a replica's entry in `/stats`.

    Args:
        replica: Its id.
        stats: Its batcher's statistics.
        more: Other fields of `ReplicaStats`.
    """
    return ReplicaStats(replica=replica, **more, batcher=stats).body()
