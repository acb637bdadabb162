"""Figures of a service, as `saturate top` shows them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.api.protocol import JSON

OUTCOMES = ("completed", "failed", "cancelled", "expired", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a replica, or of all replicas of a model. None: not known, or the model has no such thing.

    Counts and rates of a model are sums. Its percentiles are the largest of its replicas.

    Attributes:
        running: Requests that run; for a function, records.
        max_running: Requests that may run at once.
        waiting: Requests that wait.
        waiting_by_tier: The same by service tier, without those that have none.
        kv_tokens: Tokens of KV cache that are reserved for the running requests and their answers.
        kv_capacity: Tokens of KV cache.
        kv_used: The former as a share of the latter, 0 to 1.
        busy: Share of the time, 0 to 1, in which a request ran.
        requests_per_s: Requests that were completed, per second.
        prompt_tokens_per_s: Tokens in.
        output_tokens_per_s: Tokens out.
        wait_p50_s: Seconds in the queue: median of the last 512 requests; `wait_p99_s`: percentile.
        ttft_p50_s: Seconds from arrival in the replica to the first token: median of the last 512 streams;
            `ttft_p99_s`: percentile.
        ttft_goal_s: Goal for the tiers above `flex`, if there is one.
        completed: Requests that were completed since the start; `failed`, `cancelled`, `expired`,
            `rejected`: those that ended otherwise.
    """

    running: int | None = None
    max_running: int | None = None
    waiting: int | None = None
    waiting_by_tier: dict[str, int] = field(default_factory=dict)
    kv_tokens: int | None = None
    kv_capacity: int | None = None
    kv_used: float | None = None
    busy: float | None = None
    requests_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    wait_p50_s: float | None = None
    wait_p99_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    ttft_goal_s: float | None = None
    completed: int | None = None
    failed: int | None = None
    cancelled: int | None = None
    expired: int | None = None
    rejected: int | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a model.

    Attributes:
        replica: Its id.
        statistics: False if it has sent none.
        turn: Its turn, for a model that shares its device: group, state, turns, sleep_s, wake_s.
        figures: Its figures.
    """

    replica: str
    statistics: bool
    turn: JSON | None
    figures: Figures


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a model.

    Attributes:
        id: The id that clients use.
        pinned: Whether it keeps its slot.
        replicas: Replicas that serve it.
        resident: Replicas that have it in a slot now.
    """

    id: str
    pinned: bool
    replicas: int
    resident: int


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Attributes:
        id: The id that clients use.
        state: "ready", "starting", "asleep" (scaled to zero, or until its turn), "failed" or "error".
        detail: The reason of a state other than "ready", if it is known.
        simulated: Profile of its simulated device; None: its device is real.
        ready_replicas: Replicas that can serve, as Ray Serve counts them; None: not known.
        figures: Figures of its replicas together.
        replicas: Its replicas, as far as they answer.
        adapters: Its LoRA adapters.
    """

    id: str
    state: str
    detail: str
    simulated: str | None
    ready_replicas: int | None
    figures: Figures
    replicas: Sequence[Replica]
    adapters: Sequence[Adapter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Usage of a tenant, of all models together, since their replicas started.

    Attributes:
        tenant: Its name; "other": all that have no line of their own.
        calls: Calls that have ended.
        prompt_tokens: Tokens in; `cached_tokens` of them were in the prefix cache.
        output_tokens: Tokens out.
        cost: Cost of the records of functions.
        tokens_per_s: Tokens in and out, per second; None: not known yet.
    """

    tenant: str
    calls: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class View:
    """Everything that is shown.

    Attributes:
        url: Address of the service.
        time: Time of the statistics, in ISO 8601.
        interval_s: Seconds over which the rates are taken; None: there are none yet.
        models: The models that the caller may see.
        tenants: The tenants that the caller may see, those with the most tokens first.
        batches: The service's entry about `/v1/batches`; None: there are none.
    """

    url: str
    time: str
    interval_s: float | None
    models: Sequence[Model]
    tenants: Sequence[Tenant]
    batches: JSON | None
