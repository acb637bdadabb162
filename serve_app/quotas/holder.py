"""The amounts of quotas that an Engine has taken ahead, and the reservations of its calls, without I/O.

    held = free + reserved (by calls that run) + ended (their rows are not written yet)

Held and used amounts count in every window. A call counts as used when its row of the ledger is written, and
the report states the number of these rows, so that after a crash each call is charged exactly once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from uuid import uuid4

from serve_app.quotas.counters import (
    ALWAYS,
    LIMITS,
    Account,
    Ask,
    Counter,
    Grant,
    HolderAnswer,
    HolderReport,
    LimitState,
    limits_of,
)
from serve_app.quotas.windows import window_at
from serve_app.settings.usage import Quota

AHEAD_S = 1.0
"""Seconds of use that are taken ahead."""

ASKS_S = 2.0
"""Seconds after its last use in which reports ask for a counter, so that its states are known."""

IDLE_S = 60.0
"""Seconds after which an unused counter is forgotten here."""

LATEST = 0.1
"""Weight of the latest call in moving means."""

NEVER = float("-inf")

Told = dict[tuple[Counter, int], tuple[int, int, int]]
"""The amounts in a report by account: used, held, free."""


@dataclass(slots=True, eq=False)
class _Account:
    """The amounts taken of a counter in one minute."""

    minute: int
    used: int = 0
    reserved: int = 0
    ended: int = 0
    free: int = 0

    @property
    def held(self) -> int:
        return self.free + self.reserved + self.ended


class HeldCounter:
    """A counter as this process uses it: its accounts, and the states of its limits."""

    def __init__(self, counter: Counter, quota: Quota, now: float) -> None:
        self.counter = counter
        self.is_tokens = counter.kind == "tokens"
        self.current = _Account(ALWAYS)
        self.ends_at = NEVER
        self.past: list[_Account] = []
        self.states: tuple[LimitState, ...] = ()
        self.states_at = now
        self.base = 0
        self.pending = self.short = False
        self.used_at = now
        self.taken = 0
        self.rate = 0.0
        self.hold_s = 0.0
        self.used_share = 1.0
        self.set_quota(quota)

    def set_quota(self, quota: Quota) -> None:
        self.quota = quota
        self.limits = limits_of(quota, self.counter.kind)

    @property
    def spent(self) -> int:
        """The amount that calls have taken in the current minute, used or reserved."""
        return self.current.used + self.current.reserved + self.current.ended

    def amount(self, tokens: int) -> int:
        """Return the amount that a call with `tokens` tokens takes."""
        return tokens if self.is_tokens else 1

    def covers(self, amount: int, now: float) -> bool:
        return now < self.ends_at and self.current.free >= amount

    def open(self, now: float, wall: float) -> None:
        """Open an account to take from, without a grant."""
        self._retire(now)
        if self.ends_at > NEVER:
            return
        if self.counter.kind == "slots":
            self.current, self.ends_at = _Account(ALWAYS), math.inf
        else:
            window = window_at("minute", wall)
            self.current, self.ends_at = _Account(window.starts_at), now + window.ends_at - wall

    def ask(self, amounts: Sequence[int], now: float, elapsed: float) -> Ask | None:
        """Return the ask of the next report; None: it asks for nothing.

        Args:
            amounts: The amounts of the calls that wait.
            now: The time.
            elapsed: Seconds since the last report.
        """
        self._retire(now)
        # With waiting calls, reports come many times a second, too short a time to measure a rate.
        self.rate += (1 - math.exp(-elapsed / AHEAD_S)) * (self.taken / elapsed - self.rate)
        self.taken = 0
        ahead = 0 if self.short else math.ceil(self.rate * AHEAD_S)
        needed, current = sum(amounts), self.current
        # A free amount beyond the use of a second is more useful elsewhere. If calls of several processes
        # lack amounts, each process gives its part back, so that one call gets enough.
        current.free = 0 if self.pending else min(current.free, ahead + needed)
        if not amounts and now - self.used_at > ASKS_S:
            current.free = 0
            return None
        need = max(0, needed - current.free)
        least = max(0, min(amounts, default=0) - current.free)
        return Ask(self.counter, need, least, max(0, ahead + needed - current.free - need))

    def _retire(self, now: float) -> None:
        """Retire the current account if its minute is over."""
        if now >= self.ends_at > NEVER:
            self._put_away()

    def _put_away(self) -> None:
        self.current.free = 0
        self.past.append(self.current)
        self.current, self.ends_at = _Account(ALWAYS), NEVER

    def remaining(self, now: float) -> list[tuple[LimitState, int, float]]:
        """Return each limit with its remaining amount, and the seconds to the end of its window."""
        since = now - self.states_at
        found = []
        for state in self.states:
            left_s = state.ends_in_s - since
            remaining = state.limit if left_s <= 0 else state.remaining - (self.spent - self.base)
            found.append((state, min(state.limit, max(0, remaining)), max(0.0, left_s)))
        return found

    def apply(self, grant: Grant, sent_at: float) -> None:
        """Apply a grant in the answer to a report.

        Args:
            grant: The grant.
            sent_at: Time of the report.
        """
        if self.ends_at == NEVER or grant.minute != self.current.minute:
            if self.ends_at > NEVER:
                self._put_away()
            # The minute of the service ends a little later than estimated here.
            found = next((one for one in self.past if one.minute == grant.minute), None)
            if found is not None:
                self.past.remove(found)
            self.current = found or _Account(grant.minute)
        self.current.free += grant.amount
        self.ends_at = sent_at + grant.ends_in_s
        self.pending, self.short = grant.pending, grant.short
        self.states, self.states_at, self.base = grant.states, sent_at, self.spent


class Reservation:
    """The amounts that a call has reserved of its quotas.

    Args:
        holder: The holder of the amounts.
        parts: Each counter, the account that the amount was taken from, and the amount.
        tokens: The reserved tokens.
        began: Time of the reservation.
    """

    __slots__ = ("_began", "_charged", "_holder", "_parts", "_settled", "tokens")

    def __init__(
        self, holder: "Holder", parts: Sequence[tuple[HeldCounter, _Account, int]], tokens: int, began: float
    ) -> None:
        self._holder = holder
        self._parts = parts
        self._began = began
        self._settled = False
        self._charged: list[tuple[_Account, int]] = []
        self.tokens = tokens

    @property
    def minute(self) -> int:
        """The minute of the reserved amounts."""
        return max((account.minute for _, account, _ in self._parts), default=ALWAYS)

    def settle(self, tokens: int, *, request: bool) -> None:
        """Charge the use of the call, and give back the rest. A second call does nothing.

        Args:
            tokens: Tokens of prompts and answers.
            request: Whether the call counts as a request: a refused call doesn't.
        """
        if self._settled:
            return
        self._settled = True
        now = self._holder.clock()
        for limits, account, amount in self._parts:
            limits.hold_s += LATEST * (now - self._began - limits.hold_s)
            used = int(request and limits.counter.kind == "requests")
            if limits.is_tokens:
                used = tokens
                if amount:
                    limits.used_share += LATEST * (used / amount - limits.used_share)
            account.reserved -= amount
            account.ended += used
            if used:
                self._charged.append((account, used))
            if account is limits.current and now < limits.ends_at:
                account.free += max(0, amount - used)
        self._holder.given_back()

    def written(self) -> None:
        """Note that the call's row is written: a later crash of this process doesn't change the charge."""
        for account, used in self._charged:
            account.ended -= used
            account.used += used
        self._charged.clear()


class Holder:
    """The amounts of one process.

    Args:
        name: Its name, unique and never used again.
        clock: Monotonic clock, in seconds.
        rows: Returns the number of ledger rows for which `Reservation.written` was called.
        given_back: Called when a call has given something back.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        rows: Callable[[], int] = lambda: 0,
        given_back: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.given_back = given_back
        self._rows = rows
        self._limits: dict[Counter, HeldCounter] = {}
        self._number = 0
        self._reported_at = clock()
        self._sent: Told = {}
        self._told: Told = {}

    def limits(self, subject: str, quota: Quota) -> Iterator[HeldCounter]:
        """Yield the counters of a subject that its quota limits."""
        for kind in LIMITS:
            counter = Counter(subject, kind)
            found = self._limits.get(counter)
            if found is None:
                if not limits_of(quota, kind):
                    continue
                found = self._limits[counter] = HeldCounter(counter, quota, self.clock())
            elif found.quota is not quota and found.quota != quota:
                found.set_quota(quota)
            if found.limits:
                yield found

    def take(self, limits: Sequence[HeldCounter], tokens: int) -> Reservation | None:
        """Reserve a call from the free amounts; None: they don't cover it."""
        now = self.clock()
        if not all(one.covers(one.amount(tokens), now) for one in limits):
            return None
        return self._reserve(limits, tokens, now)

    def take_beyond(self, limits: Sequence[HeldCounter], tokens: int, wall: float) -> Reservation:
        """Reserve a call from the free amounts and beyond, while the service is away.

        Args:
            limits: The counters of the call.
            tokens: Its tokens.
            wall: Seconds since the epoch.
        """
        now = self.clock()
        for one in limits:
            one.open(now, wall)
            one.current.free = max(one.current.free, one.amount(tokens))
        return self._reserve(limits, tokens, now)

    def _reserve(self, limits: Sequence[HeldCounter], tokens: int, now: float) -> Reservation:
        parts = []
        for one in limits:
            amount = one.amount(tokens)
            one.current.free -= amount
            one.current.reserved += amount
            one.taken += amount
            one.used_at = now
            parts.append((one, one.current, amount))
        return Reservation(self, parts, tokens, now)

    def report(self, waiting: Sequence[tuple[Sequence[HeldCounter], int]] = ()) -> HolderReport:
        """Return the next report.

        Args:
            waiting: The counters and the tokens of each call that waits.
        """
        now = self.clock()
        elapsed = max(1e-3, now - self._reported_at)
        self._reported_at = now
        self._number += 1
        needs: dict[Counter, list[int]] = {}
        for limits, tokens in waiting:
            for one in limits:
                needs.setdefault(one.counter, []).append(one.amount(tokens))
        self._sent = {}
        accounts, asks, keys = [], [], {}
        for one in list(self._limits.values()):
            if (ask := one.ask(needs.get(one.counter, ()), now, elapsed)) is not None:
                asks.append(ask)
                if one.counter.subject.startswith("key "):
                    keys[one.counter.subject] = one.quota
            for account in (one.current, *one.past):
                if account.held or account.used:
                    said = account.used, account.held, account.free
                    self._sent[one.counter, account.minute] = said
                    accounts.append(Account(one.counter, account.minute, *said))
            if ask is None and not (one.current.held or one.past) and now - one.used_at > IDLE_S:
                # The use of its calls stays in the totals of the service.
                del self._limits[one.counter]
        return HolderReport(
            self.name, self._number, tuple(accounts), tuple(asks), tuple(keys.items()), rows=self._rows()
        )

    def apply(self, answer: HolderAnswer, sent_at: float) -> None:
        """Apply the answer to the last report.

        Args:
            answer: The answer. It must not be the answer to an earlier report.
            sent_at: Time of the report.
        """
        if answer.gone:
            self._begin_anew()
            return
        self._told = self._sent
        # Grants come first: they may reopen an account that was retired a moment too early.
        for grant in answer.grants:
            if (found := self._limits.get(grant.counter)) is not None:
                found.apply(grant, sent_at)
        for limits in self._limits.values():
            limits.past = [
                account
                for account in limits.past
                if account.held or self._told.get((limits.counter, account.minute)) != (account.used, 0, 0)
            ]

    @property
    def changed(self) -> bool:
        """True if the service lacks a change, or a free amount is to be used or given back."""
        for limits in self._limits.values():
            for account in (limits.current, *limits.past):
                told = self._told.get((limits.counter, account.minute), (0, 0, 0))
                if account.free or told != (account.used, account.held, account.free):
                    return True
        return False

    def give_up(self) -> None:
        """Give up all free amounts."""
        for limits in self._limits.values():
            limits.current.free = 0

    def set_tenants(self, subjects: dict[str, Quota]) -> None:
        """Set the quotas of all tenants, by subject."""
        for limits in self._limits.values():
            if limits.counter.subject.startswith("tenant "):
                limits.set_quota(subjects.get(limits.counter.subject, Quota()))

    def _begin_anew(self) -> None:
        """Continue under a new name: this process has stood still, and others have settled for it."""
        self.name = f"{self.name.partition('+')[0]}+{uuid4().hex[:8]}"
        self._number = 0
        self._told = {}
        for limits in self._limits.values():
            for account in (limits.current, *limits.past):
                account.used = account.free = 0
