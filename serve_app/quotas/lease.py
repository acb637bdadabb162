"""The lease of one thing: an amount that a replica may spend without asking.

Nothing here waits or does I/O.
"""

import math
from collections.abc import Iterable, Sequence

from serve_app.quotas.lease_account import LeaseAccount
from serve_app.quotas.messages import (
    NO_PERIOD,
    SLOTS,
    SPAN_OF,
    Account,
    Grant,
    LeaseID,
    LimitState,
    limits_of,
)
from serve_app.quotas.windows import WindowSum
from serve_app.settings.usage import Quota

SLOTS_S = 10.0
"""Seconds without the service after which free slots are no longer taken: it gives them to others later."""

AHEAD_S = 1.0
"""Seconds of use that a lease should cover, by the use of about as many seconds before."""

IDLE_S = 5.0
"""Seconds without a request after which the whole lease is given back."""


class Lease:
    """The lease of one thing.

    Attributes:
        id: The thing.
        kind: Its kind, that of the id.
        is_tokens: It is counted in tokens; otherwise each request counts as one.
        limits: Its limits, by name.
        smallest: The name of the lowest of them, and that limit.
        free: The amount that may be taken now.
        ends_at: When that ends, on the holder's clock.
        need: The free amount that waiting requests ask for.
        least: The amount that the smallest of them asks for.
        unmet: The part of the need that isn't there, by the last answer; 0: all is, or it isn't known.
        pending: Others may give back some of it.
        states: The limits by the last answer.
        hold_s: Moving mean of the seconds for which a request reserves.
        used_share: Moving mean of the share of a reservation that is used.
        account: The account that is taken from.
        past: Accounts of periods that are over, and those that were opened while the service was away.
        base: The free amount by the last answer.
        taken: The amount that was taken since the last report.
    """

    __slots__ = (
        "_acknowledged",
        "_active_at",
        "_local",
        "_opened",
        "_recent",
        "_sent",
        "account",
        "base",
        "ends_at",
        "free",
        "hold_s",
        "holders",
        "id",
        "is_tokens",
        "kind",
        "least",
        "limits",
        "need",
        "past",
        "pending",
        "quota",
        "smallest",
        "states",
        "states_at",
        "taken",
        "unmet",
        "used_share",
    )

    def __init__(self, id: LeaseID, quota: Quota, now: float) -> None:
        self.id = id
        self.kind = id.kind
        self.is_tokens = id.kind == "tokens"
        self.set_quota(quota)
        self.free = 0
        self.ends_at = now
        self.need = self.least = 0
        self.unmet = 0
        self.pending = False
        self.states: tuple[LimitState, ...] = ()
        self.states_at = now
        self.holders = 1
        self.hold_s = 1.0
        self.used_share = 1.0
        self.account = LeaseAccount(NO_PERIOD)
        self._sent = (0, 0, 0)
        self._acknowledged: tuple[int, int, int] | None = (0, 0, 0)
        self.past: list[LeaseAccount] = []
        self._local: dict[str, WindowSum] = {}
        self._opened = 0
        self._active_at = now
        self.base = 0
        self._recent = 0.0
        self.taken = 0

    def set_quota(self, quota: Quota) -> None:
        """Set the quota of its key or tenant, which has a limit of its kind."""
        self.quota = quota
        self.limits = limits_of(quota, self.id.kind)
        self.smallest = min(self.limits.items(), key=lambda item: item[1])

    @property
    def is_active(self) -> bool:
        """True if the service has something to learn or to recall."""
        held = self.free or self.account.reserved
        return bool(held or self.need or self.past or self.account.numbers != self._acknowledged)

    def ask(self, amounts: Sequence[int]) -> None:
        """Set the amounts that the waiting requests ask for, for the next report."""
        self.need, self.least = sum(amounts), min(amounts, default=0)

    def remaining(self, now: float) -> list[LimitState]:
        """Return the states of its limits now."""
        since = now - self.states_at
        spent = self.base - self.free
        states = []
        for state in self.states:
            left, over = state.ends_in_s - since, self.kind != "slots" and since >= state.ends_in_s
            remaining = state.limit if over else max(0, min(state.limit, state.remaining - spent))
            states.append(state._replace(remaining=remaining, ends_in_s=max(0.0, left)))
        return states

    @property
    def held(self) -> int:
        """The amount that requests in flight hold, in all accounts."""
        return self.account.reserved + sum(past.reserved for past in self.past)

    def expire(self, now: float) -> None:
        """Take nothing more from an account that has ended."""
        if now >= self.ends_at:
            if self.kind == "slots":
                self._drop()
            else:
                self._retire()

    def report(self, now: float, elapsed: float) -> Account:
        """Return what the next report has of the current account.

        Args:
            now: Time on the holder's clock.
            elapsed: Seconds since the last report.
        """
        if self.taken or self.need:
            self._active_at = now
        elif now - self._active_at >= IDLE_S:
            self._drop()
        # Requests that wait have a lease reported many times a second: no use in a short time tells a rate.
        self._recent = self._recent * math.exp(-elapsed / AHEAD_S) + self.taken
        self.taken = 0
        want = int(self._recent) if now - self._active_at < IDLE_S else 0
        self._sent = self.account.numbers
        return self.account.message(self.id, self.need, self.least, max(self.need, want))

    def acknowledge(self) -> None:
        """Note that the service has the last report."""
        self._acknowledged = self._sent

    def forget(self) -> None:
        """Note that the service may know nothing."""
        self._acknowledged = None

    def apply(self, grant: Grant, sent_at: float) -> bool:
        """Take over a grant.

        Args:
            grant: The answer to the last report.
            sent_at: When that was made, on the holder's clock.

        Returns:
            Whether something was given back to others.
        """
        account = self.account
        if grant.period != account.period:
            if account.period != NO_PERIOD:
                self._retire()
            found = next((past for past in self.past if past.period == grant.period), None)
            if found is not None:
                # The service's minute ends a little later than it seemed here.
                self.past.remove(found)
            account = self.account = found or LeaseAccount(grant.period)
        granted = max(account.granted, grant.granted)
        self.free += granted - account.granted
        account.granted = granted
        self.ends_at = sent_at + (SLOTS_S if grant.period == SLOTS else grant.ends_in_s)
        self.unmet, self.pending = grant.unmet, grant.pending
        self.states, self.states_at = grant.limits, sent_at
        self.holders = max(1, grant.holders)
        returned = grant.keep is not None and self._drop(max(0, grant.keep))
        self.base = self.free
        return returned

    def local_sum(self, limit: str) -> WindowSum:
        """Return the sum of what was taken within a limit while the service was away."""
        return self._local.setdefault(limit, WindowSum(SPAN_OF[limit]))

    def local_account(self) -> LeaseAccount:
        """Return the account for what is taken while the service is away."""
        found = next((past for past in self.past if not past.granted and past.period[:1] == "l"), None)
        if found is None:
            self._opened += 1
            # Its windows are those in which the service learns of it.
            found = LeaseAccount(f"local {self._opened}")
            self.past.append(found)
        return found

    def _drop(self, most: int = 0) -> bool:
        """Give back what is free beyond `most`; return whether there was anything."""
        if self.free <= most:
            return False
        self.account.returned += self.free - most
        self.free = most
        return True

    def _retire(self) -> None:
        """Take nothing more from the current account."""
        self._drop()
        # An answer that took more than was reserved for it has been reported as used.
        self.free = 0
        account = self.account
        if account.period != NO_PERIOD:
            self.past.append(account)
            self.account = LeaseAccount(NO_PERIOD)
            self._acknowledged = (0, 0, 0)


def tightest(leases: Iterable[Lease], kind: str, now: float) -> tuple[LimitState, int, float] | None:
    """Return the limit of a kind of which the least remains; None: there is none.

    Returns:
        Its last known state, the amount that remains now, and the seconds to the end of its window.
    """
    found: LimitState | None = None
    least, left_s = 0, 0.0
    for lease in leases:
        if lease.kind != kind:
            continue
        since, spent = now - lease.states_at, lease.base - lease.free
        for state in lease.states:
            # As `Lease.remaining`, which makes an object of each.
            remaining = state.limit if since >= state.ends_in_s else state.remaining - spent
            if found is None or remaining < least:
                found, least, left_s = state, remaining, state.ends_in_s - since
    if found is None:
        return None
    if least > found.limit:
        least = found.limit
    return found, least if least > 0 else 0, left_s if left_s > 0 else 0.0
