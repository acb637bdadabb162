"""The counters of all quotas: the amount taken in each window, and the blocks that Engines hold.

This module has no clock, thread or I/O. A holder is a process that spends: an Engine. A holder takes a block
of a counter for a minute, ahead of its requests:

    taken = used + reserved (by requests that run) + left

A block counts in every window as a whole, until its holder reports less. A report states sums, not changes,
so the next report corrects the effect of a report or an answer that is lost, repeated or late.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple, TypeVar, cast
from uuid import uuid4

from serve_app.quotas.windows import Span, window_at
from serve_app.settings.usage import Quota

Kind = Literal["tokens", "requests", "slots"]
"""The unit that is counted; a slot is one request in flight."""

LIMITS: Mapping[Kind, Mapping[str, Span | None]] = {
    "tokens": {"tokens_per_minute": "minute", "tokens_per_day": "day", "tokens_per_month": "month"},
    "requests": {"requests_per_minute": "minute"},
    "slots": {"max_concurrency": None},
}
"""The limits of a `Quota` by kind, and their windows; slots have no window."""

ALWAYS = 0
"""The minute of slots, which have no window."""

SILENT_S = 30.0
"""Seconds without a report after which the amounts that a holder holds are free again."""

ASKED_S = 3.0
"""Seconds without a report after which a holder counts as away."""

SHORT_S = 1.0
"""Seconds for which holders keep nothing ahead after a need that could not be met."""

FORGOTTEN_S = 3600.0
"""Seconds after which a key or a holder that doesn't report is forgotten."""

SLICE = 50
"""Keys and counters that are handled at a time, so that the event loop isn't held up."""

T = TypeVar("T")

_window_of = functools.lru_cache(maxsize=1024)(window_at)


class Counter(NamedTuple):
    """The counted kind of one key or tenant.

    Attributes:
        subject: `key NAME` or `tenant NAME`.
        kind: Tokens, requests or slots.
    """

    subject: str
    kind: Kind


class Block(NamedTuple):
    """The amount that a holder has taken of a counter in one minute, in three parts.

    Attributes:
        minute: The first second of the minute, since the epoch; `ALWAYS` for slots.
        used: The amount that ended requests have used.
        reserved: The amount that running requests may use.
        left: The rest.
    """

    minute: int
    used: int = 0
    reserved: int = 0
    left: int = 0

    @property
    def taken(self) -> int:
        """The whole amount."""
        return self.used + self.reserved + self.left


class CounterReport(NamedTuple):
    """A counter in a report: its blocks, and the amounts that the holder asks for.

    Attributes:
        counter: The counter.
        blocks: All blocks of the holder that aren't empty.
        need: The amount that waiting requests lack.
        least: The amount of the smallest waiting request; less is useless.
        ahead: The amount that the next second is likely to need, beyond `need`.
    """

    counter: Counter
    blocks: tuple[Block, ...] = ()
    need: int = 0
    least: int = 0
    ahead: int = 0


class HolderReport(NamedTuple):
    """The report of a holder.

    Attributes:
        holder: Its name, unique and never used again.
        number: Number of the report, from 1 on.
        counters: The counters that have changed since an answered report, or that the holder asks for.
        keys: Quotas of the keys among the counters, by subject.
        table: Version of the tenants' quotas that the holder knows.
    """

    holder: str
    number: int
    counters: tuple[CounterReport, ...] = ()
    keys: tuple[tuple[str, Quota], ...] = ()
    table: str = ""


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
    """The answer for a counter of a report.

    Attributes:
        counter: The counter.
        minute: The minute that the amount is for.
        amount: The amount that was taken for the holder.
        ends_in_s: Seconds for which the holder may spend it.
        share: The most that the holder should have left: a share of the amount that is left everywhere.
        states: The states of the limits.
    """

    counter: Counter
    minute: int
    amount: int
    ends_in_s: float
    share: int
    states: tuple[LimitState, ...]


class HolderAnswer(NamedTuple):
    """The answer to a report.

    Attributes:
        session: Name of the service's knowledge of the holder. In a new session the service knows less: the
            next reports state all counters.
        grants: A grant for each counter that has a limit.
        table: Version of the tenants' quotas.
        tenants: The quotas of all tenants, if the holder knows another version.
    """

    session: str
    grants: tuple[Grant, ...] = ()
    table: str = ""
    tenants: dict[str, Quota] | None = None


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


def slices(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items, at most `SLICE` at a time."""
    rest = iter(items)
    while part := list(islice(rest, SLICE)):
        yield part


@dataclass(slots=True)
class _Window:
    starts_at: int
    ends_at: float
    taken: int = 0


@dataclass(slots=True)
class _Counted:
    """A counter: its windows, the blocks by holder and minute, and the time of the last unmet need."""

    windows: dict[Span | None, _Window] = field(default_factory=dict)
    blocks: dict[str, dict[int, Block]] = field(default_factory=dict)
    short_at: float = float("-inf")

    def window(self, span: Span | None, now: float) -> _Window:
        """Return the current window."""
        found = self.windows.get(span)
        if found is None or now >= found.ends_at:
            found = self.windows[span] = _new_window(span, now)
        return found

    def place(self, kind: Kind, holder: str, block: Block, now: float) -> None:
        """Set a block, and the use of its minute in windows that are not over."""
        blocks = self.blocks.setdefault(holder, {})
        old = blocks.get(block.minute)
        blocks[block.minute] = block
        self._take(kind, block.minute, block.taken - (old.taken if old else 0), now)

    def drop(self, kind: Kind, holder: str, minute: int, now: float) -> None:
        """Forget a block: its use stays in the windows, and the rest is free again."""
        block = self.blocks[holder].pop(minute)
        if not self.blocks[holder]:
            del self.blocks[holder]
        self._take(kind, minute, block.used - block.taken, now)

    def current(self, minute: int) -> list[Block]:
        """Return the blocks of a minute."""
        return [block for blocks in self.blocks.values() if (block := blocks.get(minute))]

    def _take(self, kind: Kind, minute: int, amount: int, now: float) -> None:
        if amount:
            for span in LIMITS[kind].values():
                window = self.window(span, now)
                if span is None or _window_of(span, minute).starts_at == window.starts_at:
                    window.taken += amount


@dataclass(slots=True)
class _Holder:
    seen_at: float
    number: int = 0
    is_silent: bool = False
    session: str = field(default_factory=lambda: uuid4().hex)
    keys: dict[str, Quota] = field(default_factory=dict)


class Counters:
    """The counters.

    Args:
        state: The changes that `take_changes` has returned, over all earlier processes.
        at: Time on a monotonic clock, in seconds: holders of the state count as seen now.

    Attributes:
        last_seen: The latest time of a report, in seconds since the epoch.
        urgent: Whether a change must be saved before any answer leaves: a grant, or the last use of a block.

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
        self._counters: dict[Counter, _Counted] = {}
        self._changed: set[Counter | str] = set()
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
        holder = self._holders.setdefault(report.holder, _Holder(at))
        if report.number <= holder.number:
            return HolderAnswer(holder.session, table=self._table)
        holder.number, holder.seen_at, holder.is_silent = report.number, at, False
        if report.counters:
            self._changed.add(report.holder)
        for subject, quota in report.keys:
            # Replicas read a new file at different times: a replica with the old file must not undo the new
            # quota.
            known = self._keys.get(subject)
            if known is None or holder.keys.get(subject) != quota:
                holder.keys[subject], known = quota, (quota, at)
            self._keys[subject] = known[0], at
        grants = []
        for each in report.counters:
            self._set(report.holder, each, now)
            if (quota_now := self._quota(each.counter.subject)) is not None:
                grant = self._grant(report.holder, each, quota_now, now, at)
                grants += [] if grant is None else [grant]
        tenants = None if report.table == self._table else dict(self._tenants)
        return HolderAnswer(holder.session, tuple(grants), self._table, tenants)

    def subjects(self) -> dict[str, Quota]:
        """Return the quotas in force, by subject."""
        quotas = {tenant_subject(name): quota for name, quota in self._tenants.items()}
        return quotas | {subject: quota for subject, (quota, _) in self._keys.items()}

    def states(self, subject: str, quota: Quota, now: float) -> tuple[LimitState, ...]:
        """Return the states of all limits of a subject."""
        now = max(now, self.last_seen)
        states: list[LimitState] = []
        for kind in LIMITS:
            counter = Counter(subject, kind)
            found = self._counters.get(counter) or _Counted()
            blocks = found.current(_minute(kind, now)[0])
            states += self._states(counter, limits_of(quota, kind), found, blocks, now)
        return tuple(states)

    def holders(self, at: float) -> int:
        """Return the number of holders that report."""
        return sum(at - holder.seen_at <= ASKED_S for holder in self._holders.values())

    def take_changes(self) -> Iterator[dict[str, str | None]]:
        """Yield the state that has changed since the last call, by key, in slices; None: the key is deleted.

        A change during the iteration belongs to this call or to the next call. Each text is consistent.
        """
        changed, self._changed = self._changed, set()
        self.urgent = False
        if changed:
            yield {"clock": json.dumps(self.last_seen)}
        for places in slices(changed):
            yield {json.dumps(place): self._text(place) for place in places}

    def sweep(self, now: float, at: float) -> Iterator[None]:
        """Free the amounts of silent holders, and forget counters without blocks and current use, in slices.

        Args:
            now: As in `take`.
            at: As in `take`.
        """
        silent = [name for name, holder in self._holders.items() if at - holder.seen_at > SILENT_S]
        gone = {name for name in silent if at - self._holders[name].seen_at > FORGOTTEN_S}
        freed = {name for name in silent if not self._holders[name].is_silent}
        for name in freed:
            # A silent holder that reports again states all counters. Until then its blocks keep its use.
            self._holders[name].is_silent, self._holders[name].session = True, uuid4().hex
        for places in slices(list(self._counters)):
            for counter in places:
                self._sweep(counter, freed, gone, now)
            yield
        for name in gone:
            if at - self._holders[name].seen_at > FORGOTTEN_S:
                del self._holders[name]
                self._changed.add(name)
        self._keys = {name: found for name, found in self._keys.items() if at - found[1] <= FORGOTTEN_S}

    def _sweep(self, counter: Counter, freed: set[str], gone: set[str], now: float) -> None:
        found = self._counters[counter]
        for name in found.blocks.keys() & freed:
            if not self._holders[name].is_silent:
                continue
            for minute, block in list(found.blocks[name].items()):
                found.place(counter.kind, name, Block(minute, block.used), now)
            self._changed.add(counter)
        for name in found.blocks.keys() & gone:
            for minute in list(found.blocks[name]):
                found.drop(counter.kind, name, minute, now)
            self._changed.add(counter)
        if not found.blocks and not any(one.taken and now < one.ends_at for one in found.windows.values()):
            del self._counters[counter]
            self._changed.add(counter)

    # Blocks and grants

    def _set(self, holder: str, report: CounterReport, now: float) -> None:
        """Set the blocks of a counter. A known block that isn't stated is over, or its grant was lost."""
        kind = report.counter.kind
        found = self._counters.get(report.counter)
        if found is None:
            if not report.blocks:
                return
            found = self._counters[report.counter] = _Counted()
        known = found.blocks.get(holder, {})
        stated = {block.minute for block in report.blocks}
        for minute in [minute for minute in known if minute not in stated]:
            found.drop(kind, holder, minute, now)
            self._changed.add(report.counter)
        for block in report.blocks:
            if known.get(block.minute) != block:
                found.place(kind, holder, block, now)
                self._changed.add(report.counter)
                # Once a holder has the answer, it may forget the block.
                self.urgent = self.urgent or not (block.reserved or block.left)

    def _grant(self, holder: str, report: CounterReport, quota: Quota, now: float, at: float) -> Grant | None:
        counter = report.counter
        limits = limits_of(quota, counter.kind)
        if not limits:
            return None
        found = self._counters.get(counter) or _Counted()
        windows = LIMITS[counter.kind]
        room = max(0, min(limits[name] - found.window(windows[name], now).taken for name in limits))
        # Less than the smallest request is useless to this holder, and may be enough for another holder.
        given = min(report.need, room) if room >= report.least else 0
        if given < report.need:
            found.short_at = at
        minute, ends_in_s = _minute(counter.kind, now)
        sharing = found.current(minute)
        mine = found.blocks.get(holder, {}).get(minute) or Block(minute)
        share = 0
        if at - found.short_at > SHORT_S:
            # Half of the rest is shared, so the holders together never take the whole rest ahead.
            rest = room - given + sum([block.left for block in sharing])
            share = rest // (2 * (len(sharing) + (mine not in sharing)))
            given += max(0, min(report.ahead, share, room - given + mine.left) - mine.left)
        if given:
            self._counters[counter] = found
            found.place(counter.kind, holder, mine._replace(left=mine.left + given), now)
            self._changed.add(counter)
            self.urgent = True
            sharing = [one for one in sharing if one is not mine]
            sharing.append(found.blocks[holder][minute])
        states = tuple(self._states(counter, limits, found, sharing, now))
        return Grant(counter, minute, given, ends_in_s, share, states)

    def _quota(self, subject: str) -> Quota | None:
        kind, _, name = subject.partition(" ")
        if kind == "tenant":
            return self._tenants.get(name)
        found = self._keys.get(subject)
        return None if found is None else found[0]

    def _states(
        self, counter: Counter, limits: dict[str, int], found: _Counted, blocks: list[Block], now: float
    ) -> Iterator[LimitState]:
        left, reserved = sum([block.left for block in blocks]), sum([block.reserved for block in blocks])
        for name, limit in limits.items():
            window = found.window(LIMITS[counter.kind][name], now)
            remaining = max(0, limit - window.taken + left)
            yield LimitState(name, limit, remaining, reserved, window.ends_at - now)

    # State

    def _text(self, place: Counter | str) -> str | None:
        if isinstance(place, str):
            return str(holder.number) if (holder := self._holders.get(place)) else None
        if (found := self._counters.get(place)) is None:
            return None
        windows = [(span, window.starts_at, window.taken) for span, window in found.windows.items()]
        blocks = [(name, *block) for name, blocks in found.blocks.items() for block in blocks.values()]
        return json.dumps([windows, blocks])

    def _load(self, state: Mapping[str, str], at: float) -> None:
        for key, value in state.items():
            content = json.loads(value)
            if key == "clock":
                self.last_seen = float(content)
                continue
            match json.loads(key):
                case str(name):
                    self._holders.setdefault(name, _Holder(at)).number = int(content)
                case [str(subject), ("tokens" | "requests" | "slots") as kind]:
                    found = self._counters[Counter(subject, cast(Kind, kind))] = _Counted()
                    windows, blocks = content
                    for span, starts_at, taken in windows:
                        found.windows[span] = _new_window(span, int(starts_at))
                        found.windows[span].taken = int(taken)
                    for name, *amounts in blocks:
                        block = Block(*map(int, amounts))
                        found.blocks.setdefault(str(name), {})[block.minute] = block
                        self._holders.setdefault(str(name), _Holder(at))
                case other:
                    raise ValueError(f"it has an unknown {other}")


def _new_window(span: Span | None, at: float) -> _Window:
    if span is None:
        return _Window(ALWAYS, float("inf"))
    window = window_at(span, at)
    return _Window(window.starts_at, window.ends_at)


def _minute(kind: Kind, now: float) -> tuple[int, float]:
    """Return the minute in which a request counts now, and the seconds to its end."""
    if kind == "slots":
        return ALWAYS, float("inf")
    window = window_at("minute", now)
    return window.starts_at, window.ends_at - now
