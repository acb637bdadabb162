"""Leases of one replica: amounts that it may spend without asking.

Nothing here waits or does I/O. `quota_book` is the other side.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from serve_app.settings.usage import Quota
from serve_app.usage.messages import (
    NO_PERIOD,
    SLOTS,
    Account,
    Answer,
    Grant,
    LeaseID,
    LimitState,
    Report,
    limits_of,
)
from serve_app.usage.windows import Span, WindowSum

SLOTS_S = 10.0
"""Seconds without the service after which free slots are no longer taken: it gives them to others later."""

AHEAD_S = 1.0
"""Seconds of use that a lease should cover."""

FADE = 0.7
"""Share of the measured rate of use that is left after a report without use."""

IDLE_S = 5.0
"""Seconds without a request after which the whole lease is given back."""

USED = 0.1
"""Weight of the latest request in the moving means."""


class _Account:
    """An account; its numbers are those of `messages.Account`."""

    __slots__ = ("granted", "period", "reserved", "returned", "used")

    def __init__(self, period: str) -> None:
        self.period = period
        self.granted = self.used = self.returned = self.reserved = 0


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
    """

    __slots__ = (
        "_account",
        "_acknowledged",
        "_active_at",
        "_base",
        "_local",
        "_past",
        "_rate",
        "_sent",
        "_taken",
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
        "pending",
        "quota",
        "smallest",
        "states",
        "states_at",
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
        self._account = _Account(NO_PERIOD)
        self._sent = (0, 0, 0)
        self._acknowledged: tuple[int, int, int] | None = (0, 0, 0)
        self._past: list[_Account] = []
        self._local: dict[str, WindowSum] = {}
        self._active_at = now
        self._base = 0
        self._rate = 0.0
        self._taken = 0

    def set_quota(self, quota: Quota) -> None:
        """Set the quota of its key or tenant, which has a limit of its kind."""
        self.quota = quota
        self.limits = limits_of(quota, self.id.kind)
        self.smallest = min(self.limits.items(), key=lambda item: item[1])

    @property
    def is_active(self) -> bool:
        """True if the service has something to learn or to recall."""
        held = self.free or self._account.reserved
        return bool(held or self.need or self._past or self._numbers() != self._acknowledged)

    def ask(self, amounts: Sequence[int]) -> None:
        """Set the amounts that the waiting requests ask for, for the next report."""
        self.need, self.least = sum(amounts), min(amounts, default=0)

    def remaining(self, now: float) -> list[LimitState]:
        """Return the states of its limits now."""
        since = now - self.states_at
        spent = self._base - self.free
        states = []
        for state in self.states:
            left, over = state.ends_in_s - since, self.kind != "slots" and since >= state.ends_in_s
            remaining = state.limit if over else max(0, min(state.limit, state.remaining - spent))
            states.append(state._replace(remaining=remaining, ends_in_s=max(0.0, left)))
        return states

    # LeaseHolder and Reservation call the methods below.

    def _drop(self, most: int = 0) -> bool:
        """Give back what is free beyond `most`; return whether there was anything."""
        if self.free <= most:
            return False
        self._account.returned += self.free - most
        self.free = most
        return True

    def _retire(self) -> None:
        """Take nothing more from the current account."""
        self._drop()
        # An answer that took more than was reserved for it has been reported as used.
        self.free = 0
        account = self._account
        if account.period != NO_PERIOD:
            self._past.append(account)
            self._account = _Account(NO_PERIOD)
            self._acknowledged = (0, 0, 0)

    def _expire(self, now: float) -> None:
        if now >= self.ends_at:
            if self.kind == "slots":
                self._drop()
            else:
                self._retire()

    def _numbers(self) -> tuple[int, int, int]:
        account = self._account
        return account.used, account.returned, account.reserved

    def _apply(self, grant: Grant, sent_at: float) -> bool:
        """Take over a grant; return whether something was given back to others."""
        account = self._account
        if grant.period != account.period:
            if account.period != NO_PERIOD:
                self._retire()
            found = next((past for past in self._past if past.period == grant.period), None)
            if found is not None:
                # The service's minute ends a little later than it seemed here.
                self._past.remove(found)
            account = self._account = found or _Account(grant.period)
        granted = max(account.granted, grant.granted)
        self.free += granted - account.granted
        account.granted = granted
        self.ends_at = sent_at + (SLOTS_S if grant.period == SLOTS else grant.ends_in_s)
        self.unmet, self.pending = grant.unmet, grant.pending
        self.states, self.states_at = grant.limits, sent_at
        self.holders = max(1, grant.holders)
        returned = grant.keep is not None and self._drop(max(0, grant.keep))
        self._base = self.free
        return returned


class Reservation:
    """Reservation of a request; `settle` gives back what it didn't use.

    Attributes:
        leases: The leases that it was taken from.
        tokens: The tokens that are reserved.
    """

    __slots__ = ("_accounts", "_began", "_holder", "_locals", "leases", "tokens")

    def __init__(
        self,
        holder: "LeaseHolder",
        leases: Sequence[Lease],
        accounts: Sequence[_Account],
        tokens: int,
        began: float,
        local: Sequence[tuple[WindowSum, bool, int]] = (),
    ) -> None:
        self._holder: LeaseHolder | None = holder
        self._accounts = accounts
        self._began = began
        self._locals = local
        self.leases = leases
        self.tokens = tokens

    @property
    def periods(self) -> tuple[str, ...]:
        """The periods of the accounts that it was taken from."""
        return tuple(account.period for account in self._accounts)

    def settle(self, tokens: int | None = None, *, request: bool = True) -> None:
        """End the request. Further calls do nothing.

        Args:
            tokens: The tokens that it has used; None: unknown, so all that were reserved.
            request: The request counts; False: it never ran, as one whose client left while it waited.
        """
        holder, self._holder = self._holder, None
        if holder is None:
            return
        reserved = self.tokens
        used = reserved if tokens is None else tokens
        now = holder.clock()
        for lease, account in zip(self.leases, self._accounts, strict=True):
            if lease.is_tokens:
                held, spent = reserved, used
                lease.hold_s += USED * (now - self._began - lease.hold_s)
                if reserved:
                    lease.used_share += USED * (used / reserved - lease.used_share)
            else:
                held, spent = 1, int(request and lease.kind != "slots")
            account.reserved -= held
            account.used += spent
            if account is lease._account and now < lease.ends_at:
                lease.free += held - spent
            elif held > spent and account.granted:
                account.returned += held - spent
        for total, counts_tokens, since in self._locals:
            if counts_tokens:
                total.add(used - reserved, since)
        holder.gave_back(self.leases)


class _Past(NamedTuple):
    lease: Lease
    account: _Account


class LeaseHolder:
    """All leases of this replica.

    Args:
        name: Unique name, never used again.
        clock: Monotonic clock, in seconds.
        gave_back: Called when a request has given something back.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        gave_back: Callable[[Sequence[Lease]], None] = lambda leases: None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.gave_back = gave_back
        self._leases: dict[LeaseID, Lease] = {}
        self._number = 0
        self._service = ""
        self._table = ""
        self._reported_at = clock()
        self._closing: list[_Past] = []
        self._reported: list[Lease] = []
        self._opened = 0

    def lease(self, id: LeaseID, quota: Quota) -> Lease:
        """Return the lease of a thing; it is made if need be."""
        lease = self._leases.get(id)
        if lease is None:
            lease = self._leases[id] = Lease(id, quota, self.clock())
        elif lease.quota is not quota:
            lease.set_quota(quota)
        return lease

    def take(self, leases: Sequence[Lease], tokens: int) -> Reservation | None:
        """Reserve one request and its tokens in all leases; None: one of them doesn't cover it."""
        now = self.clock()
        for lease in leases:
            if lease.free < (tokens if lease.is_tokens else 1) or now >= lease.ends_at:
                return None
        accounts = []
        for lease in leases:
            amount = tokens if lease.is_tokens else 1
            lease.free -= amount
            lease._taken += amount
            account = lease._account
            account.reserved += amount
            accounts.append(account)
        return Reservation(self, leases, accounts, tokens, now)

    def take_share(self, leases: Sequence[Lease], tokens: int, wall: float) -> Reservation | LimitState:
        """Reserve from this replica's share of each limit, while the service is away.

        Args:
            leases: The leases of the request.
            tokens: Its tokens.
            wall: Seconds since the epoch.

        Returns:
            The reservation; or the limit that doesn't allow it.
        """
        taken: list[tuple[WindowSum, bool, int]] = []
        for lease in leases:
            amount = tokens if lease.is_tokens else 1
            for name, limit in lease.limits.items():
                share = limit // lease.holders
                if lease.kind == "slots":
                    held = lease._account.reserved + sum(past.reserved for past in lease._past)
                    if held + 1 > max(1, share):
                        return LimitState(name, limit, 0, held, lease.hold_s)
                    continue
                span = _span(name)
                total = lease._local.setdefault(name, WindowSum(span))
                window, used = total.at(wall)
                if used + amount > share:
                    return LimitState(name, limit, max(0, share - used), 0, window.ends_at - wall)
                taken.append((total, lease.is_tokens, window.starts_at))
        for total, counts_tokens, since in taken:
            total.add(tokens if counts_tokens else 1, since)
        accounts = []
        for lease in leases:
            account = next(
                (past for past in lease._past if not past.granted and past.period[:1] == "l"), None
            )
            if account is None:
                self._opened += 1
                # Its windows are those in which the service learns of it.
                account = _Account(f"local {self._opened}")
                lease._past.append(account)
            account.reserved += tokens if lease.is_tokens else 1
            accounts.append(account)
        return Reservation(self, leases, accounts, tokens, self.clock(), taken)

    def report(self) -> Report:
        """Return the report that is due, of all leases that are active."""
        now = self.clock()
        elapsed = max(1e-3, now - self._reported_at)
        self._reported_at = now
        self._number += 1
        self._closing, self._reported = [], []
        current, past, keys = [], [], {}
        for lease in self._leases.values():
            lease._expire(now)
            if not lease.is_active:
                continue
            if lease.id.subject.startswith("key "):
                keys[lease.id.subject] = lease.quota
            if lease._taken or lease.need:
                lease._active_at = now
            elif now - lease._active_at >= IDLE_S:
                lease._drop()
            lease._rate = max(lease._taken / elapsed, FADE * lease._rate)
            lease._taken = 0
            want = int(lease._rate * AHEAD_S) if now - lease._active_at < IDLE_S else 0
            current.append(_message(lease.id, lease._account, lease.need, lease.least, max(lease.need, want)))
            lease._sent = lease._numbers()
            self._reported.append(lease)
            for account in lease._past:
                closed = not account.reserved
                past.append(_message(lease.id, account, closed=closed))
                if closed:
                    self._closing.append(_Past(lease, account))
        return Report(
            self.name,
            self._number,
            self._service,
            self._table,
            tuple(current),
            tuple(past),
            tuple(keys.items()),
        )

    def apply(self, answer: Answer, sent_at: float) -> bool:
        """Take over the answer to the last report.

        Args:
            answer: The answer. That to an earlier report must not come here.
            sent_at: When the report was made, on the holder's clock.

        Returns:
            Whether the next report is due at once: others wait for what it gives back.
        """
        heard = answer.service == self._service
        returned = not heard
        if heard:
            for lease in self._reported:
                lease._acknowledged = lease._sent
        for grant in answer.grants:
            returned |= self._leases[grant.lease]._apply(grant, sent_at)
        if heard:
            for lease, account in self._closing:
                # An account that was granted more meanwhile is the current one again.
                if account in lease._past:
                    lease._past.remove(account)
        else:
            # A new process takes over what is reported from the next report on, which has all accounts.
            self._service = answer.service
            for lease in self._leases.values():
                lease._acknowledged = None
        self._closing, self._reported = [], []
        self._table = answer.table
        return returned

    @property
    def is_active(self) -> bool:
        """True if any lease is."""
        return any(lease.is_active for lease in self._leases.values())


def _message(
    id: LeaseID, account: _Account, need: int = 0, least: int = 0, want: int = 0, closed: bool = False
) -> Account:
    return Account(
        id,
        account.period,
        account.granted,
        account.used,
        account.returned,
        account.reserved,
        need,
        least,
        want,
        closed,
    )


def _span(limit: str) -> Span:
    return "minute" if limit.endswith("minute") else "day" if limit.endswith("day") else "month"


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
        since, spent = now - lease.states_at, lease._base - lease.free
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
