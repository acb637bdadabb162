"""Messages between the holders of leases and the service that keeps the quotas.

A holder is a replica that spends: an Ingress, or an Engine. It has an account for each quota and window. All
numbers of an account only grow, so a message that is lost, repeated or late changes no sum.
"""

from typing import Literal, NamedTuple

from serve_app.quotas.windows import Span
from serve_app.settings.usage import Quota

Kind = Literal["tokens", "requests", "slots"]
"""The thing that an account counts; a slot is one request in flight."""

NO_PERIOD = ""
"""The period of an account that a holder doesn't have yet."""

SLOTS = "slots"
"""The period of all slots: they have no window."""


class LeaseID(NamedTuple):
    """The thing that is leased: one kind, of one key or tenant.

    Attributes:
        subject: `key NAME` or `tenant NAME`.
        kind: Tokens, requests or slots.
    """

    subject: str
    kind: Kind


class Account(NamedTuple):
    """An account as its holder sees it: granted - used - returned - reserved is free.

    Attributes:
        lease: Its lease.
        period: The minute that it is for; see `period_of`.
        granted: The amount that the service has granted, as far as the holder knows.
        used: The amount that requests have used up.
        returned: The amount that was given back.
        reserved: The amount that requests in flight hold.
        need: The free amount that waiting requests ask for.
        least: The amount that the smallest of them asks for.
        want: The free amount that is of use soon.
        closed: The holder takes nothing more from it, and all of its requests have ended.
    """

    lease: LeaseID
    period: str
    granted: int = 0
    used: int = 0
    returned: int = 0
    reserved: int = 0
    need: int = 0
    least: int = 0
    want: int = 0
    closed: bool = False


class Report(NamedTuple):
    """The report of a holder.

    Attributes:
        holder: Its name, unique and never used again.
        number: Number of the report, from 1 on.
        service: Name of the process whose answers it has had; that one has heard of all its accounts.
        table: Version of the tenants' quotas that it knows.
        current: The accounts that it takes from, or wants to.
        past: Accounts of windows that are over, and those that it opened while the service was away.
        keys: Quotas of the keys among `current`, by subject.
    """

    holder: str
    number: int
    service: str = ""
    table: str = ""
    current: tuple[Account, ...] = ()
    past: tuple[Account, ...] = ()
    keys: tuple[tuple[str, Quota], ...] = ()


class LimitState(NamedTuple):
    """The state of one limit.

    Attributes:
        name: Its name in `Quota`.
        limit: The limit.
        remaining: The amount that is neither used nor reserved.
        reserved: The amount that requests in flight hold.
        ends_in_s: Seconds to the end of its window.
    """

    name: str
    limit: int
    remaining: int
    reserved: int
    ends_in_s: float


class Grant(NamedTuple):
    """The state of a current account after a report.

    Attributes:
        lease: Its lease.
        period: Its period, which may be a later one than the report's.
        granted: All that was granted in this period.
        ends_in_s: Seconds for which the holder may take from it.
        keep: Most that may stay free, since others need it; None: all.
        unmet: The part of the need that isn't there.
        pending: Others may give back some of it within a moment.
        limits: The limits of this kind.
        holders: Number of holders with an account in this period.
    """

    lease: LeaseID
    period: str
    granted: int
    ends_in_s: float
    keep: int | None
    unmet: int
    pending: bool
    limits: tuple[LimitState, ...]
    holders: int


class Answer(NamedTuple):
    """The answer to a report.

    Attributes:
        grants: The current accounts, in the report's order; without those that have no limit any more.
        service: Name of the process that answers.
        table: Version of the tenants' quotas.
        tenants: The quotas, where the holder has another version; None: it has this one.
    """

    grants: tuple[Grant, ...]
    service: str
    table: str
    tenants: dict[str, Quota] | None = None


def key_subject(name: str) -> str:
    """Return the subject of a key's quota."""
    return f"key {name}"


def tenant_subject(name: str) -> str:
    """Return the subject of a tenant's quota."""
    return f"tenant {name}"


def period_of(minute_starts_at: int) -> str:
    """Return the period of the accounts of a minute, in seconds since the epoch."""
    return str(minute_starts_at)


LIMITS: dict[Kind, tuple[str, ...]] = {
    "tokens": ("tokens_per_minute", "tokens_per_day", "tokens_per_month"),
    "requests": ("requests_per_minute",),
    "slots": ("max_concurrency",),
}
"""The limits of each kind, by their names in `Quota`."""

SPAN_OF: dict[str, Span] = {
    "tokens_per_minute": "minute",
    "tokens_per_day": "day",
    "tokens_per_month": "month",
    "requests_per_minute": "minute",
}
"""The windows of the limits that have one."""


def limits_of(quota: Quota, kind: Kind) -> dict[str, int]:
    """Return the limits of a kind that a quota has, by name."""
    values = {name: getattr(quota, name) for name in LIMITS[kind]}
    return {name: value for name, value in values.items() if value is not None}
