"""Scheduling of a request: its tier, its tenant, and how long it may wait."""

import hashlib
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from serve_app.api.errors import RequestError
from serve_app.api.headers import Headers, bearer_token

ServiceTier = Literal["auto", "default", "scale", "priority", "fast", "flex"]
"""OpenAI's names; "scale" is prepaid capacity, which isn't a separate tier here."""

TIER_PRIORITY: dict[ServiceTier, int] = {
    "priority": -1,
    "fast": -1,
    "auto": 0,
    "default": 0,
    "scale": 0,
    "flex": 1,
}

FLEX = 1
"""The priority at which requests give way to live traffic."""

TIERS = {-1: "priority", 0: "default", FLEX: "flex"}
"""Names of the tiers, by priority."""

DEFAULT_TENANT = "default"
"""The tenant of a request that states no tenant."""

MAX_TENANT = 128
MAX_QUEUE_TIMEOUT_S = 86_400.0


class Scheduling(NamedTuple):
    """The scheduling of one request.

    Attributes:
        priority: Lower goes first.
        tenant: The tenant; tenants share an engine fairly.
        queue_timeout_s: Seconds that it may wait for its start; None: no limit.
        weight: The tenant's share relative to other tenants; None: the share in the model's batcher.
        key: Name of the API key of a batch, on the requests of its rows.
        hashed: The tenant is a hash of the header Authorization, which the service doesn't check.
    """

    priority: int = 0
    tenant: str = DEFAULT_TENANT
    queue_timeout_s: float | None = None
    weight: float | None = None
    key: str = ""
    hashed: bool = False

    def share(self, adapter: str) -> str:
        """Return the name by which queues share an engine fairly: the tenant, or its part for an adapter.

        A known tenant has one share for all its adapters. An unknown tenant has a share for each adapter,
        since its requests may come from different clients. A client gains nothing by that: it could also
        state other tenants.

        Args:
            adapter: Id of the requested adapter; empty: no adapter.
        """
        if adapter and (self.hashed or self.tenant == DEFAULT_TENANT):
            return f"{self.tenant}/{adapter}"
        return self.tenant

    def deadline(self, now: float) -> float | None:
        """Return when a request that arrives `now` must have started, on the same clock."""
        return None if self.queue_timeout_s is None else now + self.queue_timeout_s


def tier(priority: int) -> str:
    """Return the name of the tier with a priority."""
    return TIERS.get(priority, "other")


DEFAULT_SCHEDULING = Scheduling()
"""The scheduling of a request without scheduling fields."""


def printable(tenant: str) -> str:
    """Return the name of a tenant; raise a ValueError if it is no such name."""
    if not 1 <= len(tenant) <= MAX_TENANT or not tenant.isprintable():
        raise ValueError(f"must be 1 to {MAX_TENANT} printable characters")
    return tenant


Tenant = Annotated[str, AfterValidator(printable)]


class SchedulingFields(BaseModel):
    """Scheduling as fields of a body.

    Attributes:
        service_tier: OpenAI's field: "priority" and "fast" go before "default", "flex" goes after it.
        tenant: The tenant; tenants share an engine fairly.
        queue_timeout_s: Seconds that the request may wait for its start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    service_tier: ServiceTier | None = None
    tenant: Tenant | None = None
    queue_timeout_s: Annotated[float, Field(strict=True, gt=0, le=MAX_QUEUE_TIMEOUT_S)] | None = None

    def scheduling(self) -> Scheduling:
        """Return the scheduling of the fields, with defaults for missing fields."""
        return Scheduling(
            TIER_PRIORITY[self.service_tier or "default"], self.tenant or DEFAULT_TENANT, self.queue_timeout_s
        )


def scheduling_of(headers: Headers, fields: SchedulingFields, *, tenant: str | None = None) -> Scheduling:
    """Return the scheduling of an HTTP request.

    A header overrides the same field of the body. Without a tenant, the tenant is a hash of the API key, from
    which the key can't be computed.

    Args:
        headers: The request's headers, their names in lower case.
        fields: The fields of the body.
        tenant: The default tenant; None: the caller is unknown.

    Raises:
        RequestError: 400 that names the invalid header.
    """
    given = dict(headers)
    scheduling = fields.scheduling()
    if (name := given.get(b"x-tenant")) is not None:
        scheduling = scheduling._replace(tenant=_tenant(name))
    elif fields.tenant is None and tenant is not None:
        scheduling = scheduling._replace(tenant=tenant)
    elif fields.tenant is None and (key := bearer_token(headers)):
        hashed = f"key-{hashlib.sha256(key).hexdigest()[:12]}"
        scheduling = scheduling._replace(tenant=hashed, hashed=True)
    if (seconds := given.get(b"x-queue-timeout-seconds")) is not None:
        scheduling = scheduling._replace(queue_timeout_s=_seconds(seconds))
    return scheduling


def _tenant(value: bytes) -> str:
    try:
        return printable(value.decode())
    except ValueError:
        message = f"x-tenant: must be 1 to {MAX_TENANT} printable characters"
        raise RequestError(400, "invalid_request_error", message, param="x-tenant") from None


def _seconds(value: bytes) -> float:
    try:
        # Only Python reads 1_000 as a number.
        seconds = float(value.replace(b"_", b"x"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_QUEUE_TIMEOUT_S:
        name = "x-queue-timeout-seconds"
        message = (
            f"{name}: must be a number of seconds above 0 and at most {MAX_QUEUE_TIMEOUT_S:.0f}, "
            f"not {value.decode('latin-1')!r}"
        )
        raise RequestError(400, "invalid_request_error", message, param=name)
    return seconds
