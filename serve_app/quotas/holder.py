"""The blocks of quotas that an Engine has taken, and the reservations of its calls, without I/O.

A call reserves from the blocks of all its counters, and is charged there when it ends. Reports state the
blocks; see `counters`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serve_app.quotas.counters import (
    ALWAYS,
    LIMITS,
    SILENT_S,
    SLICE,
    Block,
    Counter,
    CounterReport,
    Grant,
    HolderAnswer,
    HolderReport,
    LimitState,
    limits_of,
)
from serve_app.settings.usage import Quota

AHEAD_S = 1.0
"""Seconds of use that are taken ahead."""

ASKS_S = 2.0
"""Seconds after the last use of a counter in which reports ask for it, so that the states of its limits are
known."""

LATEST = 0.1
"""Weight of the latest call in moving means."""

NEVER = float("-inf")


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A `Block` from which calls reserve."""

    minute: int
    used: int = 0
    reserved: int = 0
    left: int = 0


class HeldCounter:
    """A counter as this process uses it: its blocks, and the states of its limits."""

    __slots__ = (
        "_base",
        "_calls",
        "_rate",
        "_reported_at",
        "_sent",
        "_share",
        "_states",
        "_states_at",
        "blocks",
        "counter",
        "current",
        "ends_at",
        "hold_s",
        "is_tokens",
        "limits",
        "subject",
        "taken",
        "told",
        "used_at",
        "used_share",
    )

    def __init__(self, subject: "HeldSubject", counter: Counter, limits: dict[str, int], now: float) -> None:
        self.subject = subject
        self.counter = counter
        self.is_tokens = counter.kind == "tokens"
        self.limits = limits
        self.current = HeldBlock(ALWAYS)
        self.ends_at = NEVER
        self.blocks = [self.current]
        self.told: tuple[Block, ...] | None = ()
        self._sent: tuple[Block, ...] = ()
        self._share = 0
        self._states: tuple[LimitState, ...] = ()
        self._states_at = now
        self._base = 0
        self._rate = 0.0
        self._reported_at = now
        self.used_at = now
        self.taken = 0
        self.hold_s = 0.0
        self.used_share = 1.0

    def amount(self, tokens: int) -> int:
        """Return the amount that a call with `tokens` tokens takes."""
        return tokens if self.is_tokens else 1

    def covers(self, tokens: int, now: float) -> bool:
        """Return whether the block covers a call with `tokens` tokens."""
        return now < self.ends_at and self.current.left >= self.amount(tokens)

    def stated(self) -> tuple[Block, ...]:
        """Return the blocks as a report states them."""
        return tuple(
            Block(one.minute, one.used, one.reserved, one.left)
            for one in self.blocks
            if one.used or one.reserved or one.left
        )

    def report(self, amounts: Sequence[int], now: float) -> CounterReport:
        """Return the counter in the next report.

        Args:
            amounts: The amounts of the calls that wait.
            now: The time.
        """
        told = self.told or ()
        # The service keeps the use of a block that is over, once the service has the block's last sums.
        self.blocks = [
            one
            for one in self.blocks
            if not self._is_over(one, now) or (one.used and Block(one.minute, one.used) not in told)
        ]
        # With waiting calls, reports come many times a second: the time between two is too short for a rate.
        elapsed = max(1e-3, now - self._reported_at)
        self._rate += (1 - math.exp(-elapsed / AHEAD_S)) * (self.taken / elapsed - self._rate)
        self.taken, self._reported_at = 0, now
        ahead = math.ceil(self._rate * AHEAD_S) if now - self.used_at <= ASKS_S else 0
        needed, current = sum(amounts), self.current
        # An amount that covers no waiting call is more useful elsewhere.
        kept = needed + min(ahead, self._share)
        current.left = 0 if current.left < needed or now >= self.ends_at else min(current.left, kept)
        need = 0 if current.left >= needed else needed
        least = min(amounts, default=0)
        self._sent, self.told = self.stated(), None
        return CounterReport(self.counter, self._sent, need, least, ahead)

    def rests(self, now: float) -> bool:
        """Return whether the service knows the blocks, and the counter asks for nothing."""
        return now - self.used_at > ASKS_S and not self.current.left and self.told == self.stated()

    def is_stale(self, now: float) -> bool:
        """Return whether a block is over that the service can forget."""
        return any(one.used and self._is_over(one, now) for one in self.blocks)

    def _is_over(self, block: HeldBlock, now: float) -> bool:
        return not block.reserved and (block is not self.current or now >= self.ends_at)

    def remaining(self, now: float) -> list[tuple[LimitState, int, float]]:
        """Return each limit with its remaining amount, and the seconds to the end of its window."""
        since = now - self._states_at
        spent = self.current.used + self.current.reserved - self._base
        found = []
        for state in self._states:
            left_s = state.ends_in_s - since
            remaining = state.limit if left_s <= 0 else state.remaining - spent
            found.append((state, min(state.limit, max(0, remaining)), max(0.0, left_s)))
        return found

    def acknowledge(self) -> None:
        """Note that the last report was answered."""
        self.told = self._sent

    def apply(self, grant: Grant, sent_at: float) -> None:
        """Apply a grant in the answer to a report.

        Args:
            grant: The grant.
            sent_at: Time of the report.
        """
        if grant.minute != self.current.minute or self.current not in self.blocks:
            self.current.left = 0
            found = next((one for one in self.blocks if one.minute == grant.minute), None)
            self.current = found or HeldBlock(grant.minute)
            if found is None:
                self.blocks.append(self.current)
        self.current.left += grant.amount
        self.ends_at = sent_at + grant.ends_in_s
        self._share = grant.share
        self._states, self._states_at = grant.states, sent_at
        self._base = self.current.used + self.current.reserved


class HeldSubject:
    """The counters of a key or a tenant."""

    __slots__ = ("counters", "name", "quota")

    def __init__(self, name: str, quota: Quota, now: float) -> None:
        self.name = name
        self.counters: list[HeldCounter] = []
        self.set_quota(quota, now)

    def set_quota(self, quota: Quota, now: float) -> None:
        """Set the quota. A counter without a limit stays until it holds nothing."""
        self.quota = quota
        known = {one.counter.kind: one for one in self.counters}
        for kind in LIMITS:
            limits = limits_of(quota, kind)
            if kind in known:
                known[kind].limits = limits
            elif limits:
                self.counters.append(HeldCounter(self, Counter(self.name, kind), limits, now))


class Reservation:
    """The amounts that a call has reserved of its quotas.

    Args:
        holder: The holder of the blocks.
        parts: Each counter, the block that the amount was taken from, and the amount.
        tokens: The reserved tokens.
        began: Time of the reservation.
    """

    __slots__ = ("_began", "_holder", "_parts", "tokens")

    def __init__(
        self, holder: "Holder", parts: Sequence[tuple[HeldCounter, HeldBlock, int]], tokens: int, began: float
    ) -> None:
        self._holder = holder
        self._parts = parts
        self._began = began
        self.tokens = tokens

    @property
    def minute(self) -> int:
        """The minute of the reserved amounts."""
        return max((block.minute for _, block, _ in self._parts), default=ALWAYS)

    def settle(self, tokens: int, *, request: bool) -> None:
        """Charge the use of the call, and give back the rest; called once.

        Args:
            tokens: Tokens of prompts and answers.
            request: Whether the call counts as a request: a refused call doesn't.
        """
        now = self._holder.clock()
        for one, block, amount in self._parts:
            one.hold_s += LATEST * (now - self._began - one.hold_s)
            if one.is_tokens:
                used = tokens
                if amount:
                    one.used_share += LATEST * (used / amount - one.used_share)
            else:
                used = 1 if request and one.counter.kind == "requests" else 0
            block.reserved -= amount
            block.used += used
            if block is one.current and amount > used and now < one.ends_at:
                block.left += amount - used
            self._holder.busy.add(one.subject)
        self._holder.given_back()


class Holder:
    """The blocks of one process.

    Args:
        name: Its name, unique and never used again.
        clock: Monotonic clock, in seconds.
        given_back: Called when a call has given an amount back.

    Attributes:
        busy: The subjects whose counters the next reports state.
    """

    def __init__(
        self, name: str, clock: Callable[[], float], given_back: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self.clock = clock
        self.given_back = given_back
        self.busy: set[HeldSubject] = set()
        self._subjects: dict[str, HeldSubject] = {}
        self._number = 0
        self._session = ""
        self._holds_until = NEVER
        self._round: list[HeldSubject] = []
        self._sent: list[HeldSubject] = []
        self._quiet: list[HeldSubject] = []

    def limits(self, subject: str, quota: Quota) -> list[HeldCounter]:
        """Return the counters of a subject that its quota limits."""
        found = self._subjects.get(subject)
        if found is None:
            found = self._subjects[subject] = HeldSubject(subject, quota, self.clock())
        elif found.quota is not quota and found.quota != quota:
            found.set_quota(quota, self.clock())
        return [one for one in found.counters if one.limits]

    def take(self, limits: Sequence[HeldCounter], tokens: int) -> Reservation | None:
        """Reserve the amounts of a call from the blocks; None: the blocks don't cover the call."""
        now = self.clock()
        if now >= self._holds_until:
            return None
        for one in limits:
            if now >= one.ends_at or one.current.left < (tokens if one.is_tokens else 1):
                return None
        parts = []
        for one in limits:
            amount, block = tokens if one.is_tokens else 1, one.current
            block.left -= amount
            block.reserved += amount
            one.taken += amount
            one.used_at = now
            self.busy.add(one.subject)
            parts.append((one, block, amount))
        return Reservation(self, parts, tokens, now)

    def report(self, waiting: Iterable[tuple[Sequence[HeldCounter], int]] = ()) -> HolderReport:
        """Return the next report.

        Args:
            waiting: Counters and tokens of all calls that wait; the report asks for the first `SLICE`.
        """
        now = self.clock()
        self._number += 1
        needs: dict[HeldCounter, list[int]] = {}
        for place, (limits, tokens) in enumerate(waiting):
            for one in limits:
                # A counter at rest may be forgotten, and the answer would not find it.
                one.used_at = now
                if place < SLICE:
                    needs.setdefault(one, []).append(one.amount(tokens))
        self._sent = list(dict.fromkeys([*(one.subject for one in needs), *self._next()]))
        counters: list[CounterReport] = []
        keys = {}
        for subject in self._sent:
            counters += [
                one.report(needs.get(one, ()), now) for one in subject.counters if one.limits or one.blocks
            ]
            if subject.name.startswith("key "):
                keys[subject.name] = subject.quota
        return HolderReport(self.name, self._number, tuple(counters), tuple(keys.items()))

    @property
    def has_more(self) -> bool:
        """Whether busy subjects had no place in the last report."""
        return bool(self._round)

    def apply(self, answer: HolderAnswer, sent_at: float) -> None:
        """Apply the answer to the last report.

        Args:
            answer: The answer. It must not be the answer to an earlier report.
            sent_at: Time of the report.
        """
        # After this time the service counts the amounts of a silent holder as free.
        self._holds_until = sent_at + SILENT_S
        for subject in self._sent:
            for one in subject.counters:
                one.acknowledge()
        for grant in answer.grants:
            found = self._subjects.get(grant.counter.subject)
            for one in found.counters if found else ():
                if one.counter == grant.counter:
                    one.apply(grant, sent_at)
        if answer.session != self._session:
            self._session = answer.session
            self.busy.update(self._subjects.values())
            for subject in self.busy.difference(self._sent):
                for one in subject.counters:
                    one.told = None

    def give_up(self) -> None:
        """Give back the rest of all blocks."""
        for subject in self._subjects.values():
            for one in subject.counters:
                one.current.left = 0
        self.busy.update(self._subjects.values())

    def set_tenants(self, subjects: dict[str, Quota]) -> None:
        """Set the quotas of all tenants, by subject."""
        for name, subject in self._subjects.items():
            if name.startswith("tenant "):
                subject.set_quota(subjects.get(name, Quota()), self.clock())

    def _next(self) -> list[HeldSubject]:
        """Return the next busy subjects. A subject at rest leaves `busy`, and without blocks is forgotten."""
        now = self.clock()
        if NEVER < self._holds_until <= now:
            self._holds_until = NEVER
            self.give_up()
        if not self._quiet:
            self._quiet = list(self._subjects.values())
        for _ in range(min(SLICE, len(self._quiet))):
            subject = self._quiet.pop()
            if any(one.is_stale(now) for one in subject.counters):
                self.busy.add(subject)
        if not self._round:
            self._round = list(self.busy)
        found: list[HeldSubject] = []
        while self._round and len(found) < SLICE:
            subject = self._round.pop()
            if any(not one.rests(now) or one.is_stale(now) for one in subject.counters):
                found.append(subject)
                continue
            self.busy.discard(subject)
            if not any(one.told for one in subject.counters):
                self._subjects.pop(subject.name, None)
        return found
