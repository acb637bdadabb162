"""The counters of all quotas: the used amount of each limit, and the amounts that Engines hold.

This module only decides: it has no clock, thread or I/O. A holder is a process that spends: an Engine. A
holder takes amounts ahead of its requests, and each of its reports states the amounts that it has used and
still holds. Both count, in every window, until a later report states less. A report states sums, not changes,
so the next report corrects the effect of a report or an answer that is lost, repeated or late.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from serve_app.quotas.windows import Span, window_at
from serve_app.settings.usage import Quota

Kind = Literal["tokens", "requests", "slots"]
"""The thing that is counted; a slot is one request in flight."""

LIMITS: Mapping[Kind, Mapping[str, Span | None]] = {
    "tokens": {"tokens_per_minute": "minute", "tokens_per_day": "day", "tokens_per_month": "month"},
    "requests": {"requests_per_minute": "minute"},
    "slots": {"max_concurrency": None},
}
"""The limits of a `Quota` by kind, and their windows; slots have no window."""

SPANS: Mapping[Kind, tuple[Span | None, ...]] = {
    kind: tuple(limits.values()) for kind, limits in LIMITS.items()
}

ALWAYS = 0
"""The minute of slots, which have no window."""

SILENT_S = 30.0
"""Seconds without a report after which the slots of a holder are free again."""

GONE_S = 120.0
"""Seconds without a report after which a holder counts as gone, and its held amounts as used.

With a ledger, other processes settle for the holder earlier, by its rows."""

ASKED_S = 3.0
"""Seconds without a report after which no call waits for the amounts of a holder."""

SHORT_S = 1.0
"""Seconds for which holders give back free amounts after a need that could not be met."""

FORGOTTEN_S = 3600.0
"""Seconds after which a key that no report names is forgotten, and a gone holder's name is free again."""

SWEEP_S = 10.0


class Counter(NamedTuple):
    """The counted kind of one key or tenant.

    Attributes:
        subject: `key NAME` or `tenant NAME`.
        kind: Tokens, requests or slots.
    """

    subject: str
    kind: Kind


class Account(NamedTuple):
    """The amounts that a holder has taken of a counter in one minute.

    Attributes:
        counter: The counter.
        minute: The first second of the minute, since the epoch; `ALWAYS` for slots.
        used: The amount that is finally used.
        held: The amount that requests in flight have reserved, and the free amount.
        free: The part of `held` that no request has reserved.
    """

    counter: Counter
    minute: int
    used: int
    held: int
    free: int


class Ask(NamedTuple):
    """The amounts that a holder asks for.

    Attributes:
        counter: The counter.
        need: The amount that waiting requests lack.
        least: The amount that is enough for the smallest waiting request; less is useless.
        want: The amount that will be useful soon.
    """

    counter: Counter
    need: int = 0
    least: int = 0
    want: int = 0


class HolderReport(NamedTuple):
    """The report of a holder.

    Attributes:
        holder: Its name, unique and never used again.
        number: Number of the report, from 1 on.
        accounts: All accounts with a held amount, and all accounts that are new since the last answer.
        asks: The amounts that it asks for.
        keys: Quotas of the keys in `asks`, by subject.
        table: Version of the tenants' quotas that it knows.
        rows: Number of ledger rows that it has written; their use is in the accounts.
    """

    holder: str
    number: int
    accounts: tuple[Account, ...] = ()
    asks: tuple[Ask, ...] = ()
    keys: tuple[tuple[str, Quota], ...] = ()
    table: str = ""
    rows: int = 0


class LimitState(NamedTuple):
    """The state of one limit.

    Attributes:
        name: Its name in `Quota`.
        limit: The limit.
        remaining: The amount that is neither used nor reserved.
        reserved: The amount that requests in flight have reserved.
        ends_in_s: Seconds to the end of its window; infinity: it has no window.
    """

    name: str
    limit: int
    remaining: int
    reserved: int
    ends_in_s: float


class Grant(NamedTuple):
    """The answer to an `Ask`.

    Attributes:
        counter: The counter.
        minute: The minute that the amount is for.
        amount: The amount that was taken for the holder.
        ends_in_s: Seconds for which the holder may spend it.
        pending: Whether other holders will give back the missing amount.
        short: Whether some holder lacks an amount: holders give back free amounts, and take nothing ahead.
        states: The states of the limits.
    """

    counter: Counter
    minute: int
    amount: int
    ends_in_s: float
    pending: bool
    short: bool
    states: tuple[LimitState, ...]


class HolderAnswer(NamedTuple):
    """The answer to a report.

    Attributes:
        grants: A grant for each `Ask` that has a limit.
        table: Version of the tenants' quotas.
        tenants: The quotas of all tenants, if the holder knows another version.
        gone: The holder counts as gone: other processes have settled for it. It continues under a new name.
    """

    grants: tuple[Grant, ...] = ()
    table: str = ""
    tenants: dict[str, Quota] | None = None
    gone: bool = False


class Charge(NamedTuple):
    """The use of a subject by a process that has died, beyond the last report of the process."""

    subject: str
    tokens: int
    requests: int


def key_subject(name: str) -> str:
    """Return the subject of a key's quota."""
    return f"key {name}"


def tenant_subject(name: str) -> str:
    """Return the subject of a tenant's quota."""
    return f"tenant {name}"


def limits_of(quota: Quota, kind: Kind) -> dict[str, int]:
    """Return the limits of a quota that count a kind, by their names."""
    found = {name: getattr(quota, name) for name in LIMITS[kind]}
    return {name: limit for name, limit in found.items() if limit is not None}


@dataclass(slots=True)
class _Entry:
    used: int = 0
    held: int = 0
    free: int = 0


@dataclass(slots=True)
class _Total:
    """The amount that is used and held in the current window."""

    starts_at: int
    ends_at: float
    charged: int = 0


@dataclass(slots=True)
class _Holder:
    seen_at: float
    number: int = 0
    rows: int = 0
    keys: dict[str, Quota] = field(default_factory=dict)
    accounts: dict[tuple[Counter, int], _Entry] = field(default_factory=dict)


Total = tuple[str, Kind, Span | None]


class Counters:
    """The counters.

    Args:
        state: The changes that `take_changes` has returned, over all earlier processes.
        at: Time on a monotonic clock, in seconds: holders of the state count as seen now.

    Attributes:
        last_seen: The latest time of a report, in seconds since the epoch.
        urgent: Something was granted or settled since `take_changes`, and must be saved before any answer
            leaves.

    Raises:
        ValueError: The state is not a state of quotas.
    """

    def __init__(self, state: Mapping[str, str], at: float) -> None:
        self.last_seen = 0.0
        self.urgent = False
        self._tenants: dict[str, Quota] = {}
        self._table = ""
        self._keys: dict[str, tuple[Quota, float]] = {}
        self._holders: dict[str, _Holder] = {}
        self._gone: dict[str, float] = {}
        self._totals: dict[Total, _Total] = {}
        self._short: dict[Counter, float] = {}
        self._changed: set[tuple[str, ...]] = set()
        self._swept_at = at
        self._load(state, at)

    def set_tenants(self, quotas: Mapping[str, Quota], version: str) -> None:
        """Set the quotas of all tenants, by their names."""
        self._tenants, self._table = dict(quotas), version

    def take(self, report: HolderReport, now: float, at: float) -> HolderAnswer:
        """Apply a report, and grant its asks as far as all limits allow.

        Args:
            report: The report. A report older than the holder's last report changes nothing.
            now: Seconds since the epoch; never less than in an earlier call.
            at: Time on the monotonic clock, in seconds.
        """
        self.last_seen = now
        self._sweep(now, at)
        if report.holder in self._gone:
            return HolderAnswer(gone=True)
        holder = self._holders.setdefault(report.holder, _Holder(at))
        if report.number <= holder.number:
            return HolderAnswer(table=self._table)
        holder.number, holder.rows, holder.seen_at = report.number, report.rows, at
        self._changed.add(("holder", report.holder))
        for subject, quota in report.keys:
            # Replicas read a new file at different times: a replica with the old file must not undo the new
            # quota.
            known = self._keys.get(subject)
            if known is None or holder.keys.get(subject) != quota:
                holder.keys[subject], known = quota, (quota, at)
            self._keys[subject] = known[0], at
        listed = set()
        for account in report.accounts:
            place = account.counter, account.minute
            listed.add(place)
            self._set(report.holder, holder, place, account.used, account.held, account.free, now)
        for place in [place for place in holder.accounts if place not in listed]:
            # The answer with the account's last grant was lost, or the account is settled: its use stays in
            # the totals.
            self._drop(report.holder, holder, place, now)
        grants = [grant for ask in report.asks if (grant := self._grant(report.holder, holder, ask, now, at))]
        return HolderAnswer(
            tuple(grants), self._table, None if report.table == self._table else dict(self._tenants)
        )

    def rows_of(self, holder: str) -> int | None:
        """Return the number of ledger rows whose use a holder has reported; None: the holder is unknown."""
        found = self._holders.get(holder)
        return None if found is None else found.rows

    def settle(self, name: str, charges: tuple[Charge, ...], now: float, at: float) -> None:
        """Settle for a holder that has died: charge its use, and free the rest of its held amounts.

        Args:
            name: The holder.
            charges: Its use since its last report, at most the amounts that it held.
            now: Seconds since the epoch.
            at: Time on the monotonic clock, in seconds.
        """
        holder = self._holders.get(name)
        if holder is None:
            return
        for charge in charges:
            for kind, amount in (("tokens", charge.tokens), ("requests", charge.requests)):
                self._charge_dead(name, holder, Counter(charge.subject, cast(Kind, kind)), amount, now)
        self._end(name, holder, now, at)

    def states(self, now: float) -> dict[str, tuple[LimitState, ...]]:
        """Return the states of all limits, by subject."""
        now = max(now, self.last_seen)
        quotas = {tenant_subject(name): quota for name, quota in self._tenants.items()}
        quotas |= {subject: quota for subject, (quota, _) in self._keys.items()}
        return {
            subject: tuple(
                state for kind in LIMITS for state in self._states(Counter(subject, kind), quota, now)
            )
            for subject, quota in quotas.items()
        }

    def holders(self, at: float) -> int:
        """Return the number of holders that report."""
        return sum(at - holder.seen_at <= ASKED_S for holder in self._holders.values())

    def take_changes(self) -> dict[str, str | None]:
        """Return the state that has changed since the last call, by key; None: the key is deleted."""
        changes: dict[str, str | None] = {}
        for place in self._changed:
            changes[json.dumps(place)] = self._text(place)
        if changes:
            changes["clock"] = json.dumps(self.last_seen)
        self._changed.clear()
        self.urgent = False
        return changes

    # Accounts and totals

    def _set(
        self,
        name: str,
        holder: _Holder,
        place: tuple[Counter, int],
        used: int,
        held: int,
        free: int,
        now: float,
    ) -> None:
        entry = holder.accounts.get(place)
        if entry is None:
            if not (used or held):
                return
            entry = holder.accounts[place] = _Entry()
        elif (entry.used, entry.held, entry.free) == (used, held, free):
            return
        self._charge(place, used + held - entry.used - entry.held, now)
        # Once a holder has the answer, it may forget an account without a held amount.
        self.urgent = self.urgent or not held
        entry.used, entry.held, entry.free = used, held, free
        self._changed.add(("account", name, *place[0], str(place[1])))

    def _drop(self, name: str, holder: _Holder, place: tuple[Counter, int], now: float) -> None:
        """Forget an account: its use stays in the totals, and its held amount is free again."""
        self._charge(place, -holder.accounts.pop(place).held, now)
        self._changed.add(("account", name, *place[0], str(place[1])))

    def _charge(self, place: tuple[Counter, int], amount: int, now: float) -> None:
        """Add to those windows of a minute that are not over."""
        counter, minute = place
        if not amount:
            return
        for span in SPANS[counter.kind]:
            total = self._total(counter, span, now)
            if span is None or window_at(span, minute).starts_at == total.starts_at:
                total.charged += amount
                self._changed.add(("total", *counter, str(span)))

    def _total(self, counter: Counter, span: Span | None, now: float) -> _Total:
        place = (*counter, span)
        total = self._totals.get(place)
        if total is None or now >= total.ends_at:
            window = None if span is None else window_at(span, now)
            total = _Total(window.starts_at, window.ends_at) if window else _Total(ALWAYS, float("inf"))
            self._totals[place] = total
        return total

    def _charge_dead(self, name: str, holder: _Holder, counter: Counter, amount: int, now: float) -> None:
        places = sorted(
            (place for place in holder.accounts if place[0] == counter), key=lambda place: -place[1]
        )
        for place in places:
            entry = holder.accounts[place]
            part = min(amount, entry.held)
            amount -= part
            self._set(name, holder, place, entry.used + part, entry.held - part, 0, now)

    def _end(self, name: str, holder: _Holder, now: float, at: float) -> None:
        for place in list(holder.accounts):
            self._drop(name, holder, place, now)
        del self._holders[name]
        self._gone[name] = at
        self._changed.add(("holder", name))
        self.urgent = True

    # Grants

    def _grant(self, name: str, holder: _Holder, ask: Ask, now: float, at: float) -> Grant | None:
        counter = ask.counter
        quota = self._quota(counter.subject)
        limits = limits_of(quota, counter.kind) if quota else {}
        if quota is None or not limits:
            return None
        minute, ends_in_s = _minute(counter.kind, now)
        place = counter, minute
        room = max(
            0,
            min(
                limit - self._total(counter, LIMITS[counter.kind][limit_name], now).charged
                for limit_name, limit in limits.items()
            ),
        )
        given = min(ask.need, room)
        if given < ask.least:
            # A part of a request is useless here, and may complete a request of another holder.
            given = 0
        sharing = [
            (other, entry)
            for other in self._holders.values()
            if other is not holder and (entry := other.accounts.get(place))
        ]
        lacks = ask.need > given
        others = any(entry.free and at - other.seen_at <= ASKED_S for other, entry in sharing)
        if lacks and others:
            self._short[counter] = at
        short = at - self._short.get(counter, float("-inf")) <= SHORT_S
        if not lacks and not short:
            # A share of the rest, so that the holders together never take the whole rest ahead.
            given += min(ask.want, (room - given) // (2 * (1 + len(sharing))))
        if given:
            entry = holder.accounts.get(place, _Entry())
            self._set(name, holder, place, entry.used, entry.held + given, entry.free + given, now)
            self.urgent = True
        states = tuple(self._states(counter, quota, now))
        return Grant(counter, minute, given, ends_in_s, lacks and others, short, states)

    def _quota(self, subject: str) -> Quota | None:
        kind, _, name = subject.partition(" ")
        if kind == "tenant":
            return self._tenants.get(name)
        found = self._keys.get(subject)
        return None if found is None else found[0]

    def _states(self, counter: Counter, quota: Quota, now: float) -> Iterator[LimitState]:
        place = counter, _minute(counter.kind, now)[0]
        entries = [entry for holder in self._holders.values() if (entry := holder.accounts.get(place))]
        free = sum(entry.free for entry in entries)
        reserved = sum(entry.held for entry in entries) - free
        for name, limit in limits_of(quota, counter.kind).items():
            total = self._total(counter, LIMITS[counter.kind][name], now)
            remaining = max(0, limit - total.charged + free)
            yield LimitState(name, limit, remaining, reserved, total.ends_at - now)

    # Ended windows and silent holders

    def _sweep(self, now: float, at: float) -> None:
        """Free the amounts of silent holders, and forget windows that are over."""
        if at - self._swept_at < SWEEP_S:
            return
        self._swept_at = at
        for name, holder in list(self._holders.items()):
            silent_s = at - holder.seen_at
            if silent_s > GONE_S:
                # The use of its calls is unknown, and at most the amount that the holder had.
                for place, entry in holder.accounts.items():
                    if place[1] != ALWAYS:
                        self._set(name, holder, place, entry.used + entry.held, 0, 0, now)
                self._end(name, holder, now, at)
            elif silent_s > SILENT_S:
                for place in [place for place in holder.accounts if place[1] == ALWAYS]:
                    self._drop(name, holder, place, now)
        over = [
            place
            for place, total in self._totals.items()
            # Slots have no window: their counter is over once no slot is taken.
            if total.ends_at <= now or (place[2] is None and not total.charged)
        ]
        for total_place in over:
            del self._totals[total_place]
            self._changed.add(("total", *total_place[:2], str(total_place[2])))
        self._short = {counter: since for counter, since in self._short.items() if at - since <= SHORT_S}
        self._gone = {name: since for name, since in self._gone.items() if at - since <= FORGOTTEN_S}
        self._keys = {name: found for name, found in self._keys.items() if at - found[1] <= FORGOTTEN_S}

    # State

    def _text(self, place: tuple[str, ...]) -> str | None:
        kind, *rest = place
        match kind:
            case "holder":
                holder = self._holders.get(rest[0])
                return None if holder is None else json.dumps([holder.number, holder.rows])
            case "account":
                name, subject, thing, minute = rest
                found = self._holders.get(name)
                counter = Counter(subject, cast(Kind, thing))
                entry = found.accounts.get((counter, int(minute))) if found else None
                return None if entry is None else json.dumps([entry.used, entry.held, entry.free])
            case _:
                subject, thing, span = rest
                total = self._totals.get((subject, cast(Kind, thing), _span(span)))
                return None if total is None else json.dumps([total.starts_at, total.charged])

    def _load(self, state: Mapping[str, str], at: float) -> None:
        for text, value in state.items():
            found = json.loads(value)
            if text == "clock":
                self.last_seen = float(found)
                continue
            kind, *rest = json.loads(text)
            match kind:
                case "holder":
                    holder = self._holders.setdefault(rest[0], _Holder(at))
                    holder.number, holder.rows = map(int, found)
                case "account":
                    name, subject, thing, minute = rest
                    accounts = self._holders.setdefault(name, _Holder(at)).accounts
                    accounts[Counter(subject, thing), int(minute)] = _Entry(*map(int, found))
                case "total":
                    subject, thing, text_span = rest
                    span = _span(text_span)
                    starts_at, charged = map(int, found)
                    ends_at = float("inf") if span is None else window_at(span, starts_at).ends_at
                    self._totals[subject, thing, span] = _Total(starts_at, ends_at, charged)
                case _:
                    raise ValueError(f"it has an unknown {kind}")


def _minute(kind: Kind, now: float) -> tuple[int, float]:
    """Return the minute in which a request counts now, and the seconds to its end."""
    if kind == "slots":
        return ALWAYS, float("inf")
    window = window_at("minute", now)
    return window.starts_at, window.ends_at - now


def _span(text: str) -> Span | None:
    return None if text == "None" else cast(Span, text)
