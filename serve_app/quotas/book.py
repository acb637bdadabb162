"""The book of all quotas: grants to holders, sums of windows, and what remains.

It decides and does nothing else: no clock, no thread, no I/O. Amounts are granted to holders ahead of
requests (leases), and count as used from then on, until the holder reports less. So no order of reports,
crashes and restarts lets anyone use more than a limit, and a restart changes no sum.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from serve_app.quotas.book_entry import BookEntry
from serve_app.quotas.messages import (
    NO_PERIOD,
    SLOTS,
    SPAN_OF,
    Account,
    Answer,
    Grant,
    LeaseID,
    LimitState,
    Report,
    limits_of,
    period_of,
    tenant_subject,
)
from serve_app.quotas.window_totals import SPANS, WindowTotals
from serve_app.quotas.windows import window_at
from serve_app.settings.usage import Quota

SILENT_S = 30.0
"""Seconds without a report after which a holder counts as gone, and its slots are free again."""

ASKED_S = 3.0
"""Seconds without a report after which nothing that a holder has is waited for."""

SHORT_S = 1.0
"""Seconds for which holders give back what is free after a need that could not be met."""

SWEEP_S = 10.0


@dataclass(slots=True)
class _Holder:
    seen_at: float
    number: int = 0
    keys: dict[str, Quota] = field(default_factory=dict)
    entries: dict[tuple[LeaseID, str], BookEntry] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """The accounts of the current period of a lease, by holder."""

    period: str
    entries: dict[str, BookEntry] = field(default_factory=dict)
    short_since: float = float("-inf")


class QuotaBook:
    """The book.

    Args:
        state: What `take_changes` returned, over all earlier processes.
        at: Time on a monotonic clock, in seconds: holders of the state count as seen now.
        name: Name of this process, never used again.
    """

    def __init__(self, state: Mapping[str, str], at: float, name: str) -> None:
        self._name = name
        self._quotas: dict[str, Quota] = {}
        self._tenants: dict[str, Quota] = {}
        self._table = ""
        self._totals = WindowTotals()
        self._open: dict[LeaseID, _Open] = {}
        self._holders: dict[str, _Holder] = {}
        self._changed: dict[str, str | None] = {}
        self._touched: set[BookEntry] = set()
        self._swept_at = at
        self.last_seen = 0.0
        self.urgent = False
        self._load(state, at)

    def set_tenants(self, quotas: Mapping[str, Quota], version: str) -> None:
        """Set the quotas of all tenants, by their names."""
        for name in self._tenants:
            self._quotas.pop(tenant_subject(name), None)
        self._tenants, self._table = dict(quotas), version
        self._quotas.update({tenant_subject(name): quota for name, quota in quotas.items()})

    def exchange(self, report: Report, now: float, at: float) -> Answer:
        """Take a report, and grant what it asks for as far as the limits allow.

        Args:
            report: The report. One that is older than another of its holder changes nothing.
            now: Seconds since the epoch; never less than in an earlier call.
            at: Time on the monotonic clock, in seconds.
        """
        self.last_seen = now
        self._sweep(now, at)
        holder = self._holders.setdefault(report.holder, _Holder(at))
        if report.number <= holder.number:
            return Answer((), self._name, self._table)
        # The first reports to this process may be late ones, and the state is older than they are: they
        # count once the holder knows this process, and so tells it of all accounts.
        complete = report.service == self._name
        holder.number, holder.seen_at = report.number, at
        for subject, quota in report.keys:
            # Replicas read a new file at different times: the one that has seen it last must not undo it.
            if holder.keys.get(subject) != quota or subject not in self._quotas:
                holder.keys[subject] = self._quotas[subject] = quota
        if complete:
            self._forget(holder, report)
            for account in (*report.past, *report.current):
                self._settle(report.holder, account, now)
        grants = [self._grant(report.holder, account, now, at) for account in report.current]
        return Answer(
            tuple(grant for grant in grants if grant is not None),
            self._name,
            self._table,
            None if report.table == self._table else self._tenants,
        )

    def take_changes(self) -> dict[str, str | None]:
        """Return the state that has changed since the last call, by key; None: the key is deleted."""
        changed = self._changed
        changed.update((entry.key, entry.text) for entry in self._touched)
        changed.update(self._totals.take_changes())
        if changed:
            changed["clock"] = json.dumps(self.last_seen)
        self._changed = {}
        self._touched.clear()
        self.urgent = False
        return changed

    def states(self, now: float) -> dict[str, tuple[LimitState, ...]]:
        """Return the state of all limits, by subject."""
        return {
            subject: tuple(
                state
                for kind in SPANS
                for state in self._limit_states(LeaseID(subject, kind), quota, max(now, self.last_seen))
            )
            for subject, quota in self._quotas.items()
        }

    def holders(self, at: float) -> int:
        """Return the number of holders that report."""
        return sum(at - holder.seen_at <= ASKED_S for holder in self._holders.values())

    # Accounts

    def _settle(self, holder: str, account: Account, now: float) -> None:
        """Take over what an account's holder reports.

        A grant that it doesn't know, since the answer was lost, it can't use any more: no later answer than
        that to its last report reaches it.
        """
        period = account.period
        if period == NO_PERIOD:
            return
        entry = self._holders[holder].entries.get((account.lease, period))
        if entry is None:
            if not (account.granted or account.used or account.reserved):
                return
            # It was opened while this service was away, or the state is lost: the holder knows best.
            entry = self._enter(holder, account.lease, period, now)
        self._change(
            entry,
            account.granted,
            max(entry.used, account.used),
            max(entry.returned, account.returned),
            account.reserved,
        )
        if account.closed and not entry.closed:
            entry.closed = self.urgent = True
            self._touched.add(entry)

    def _forget(self, holder: _Holder, report: Report) -> None:
        """Forget what a report no longer has.

        Its holder knows that a closed account is closed. Of any other it has nothing free: what is free in
        the book was granted by an answer that was lost.
        """
        named = {(account.lease, account.period) for account in (*report.past, *report.current)}
        for key in [key for key in holder.entries if key not in named]:
            entry = holder.entries[key]
            if not entry.closed and entry.free:
                known = entry.used + entry.returned + entry.reserved
                self._change(entry, known, entry.used, entry.returned, entry.reserved)
            if entry.closed or not entry.granted:
                self._remove(entry)

    def _enter(self, holder: str, lease: LeaseID, period: str, now: float) -> BookEntry:
        """Add an account: to the windows of its period, as far as they last, or to the current ones."""
        totals = self._totals.of(lease, now)
        if period.isdecimal():
            since = int(period)
            totals = [total for total in totals if window_at(total.window.span, since) == total.window]
        entry = BookEntry(lease, period, holder, tuple(totals))
        self._holders[holder].entries[lease, period] = entry
        if period == self._period(lease, now):
            self._open_of(lease, now).entries[holder] = entry
        return entry

    def _change(
        self, entry: BookEntry, granted: int, used: int, returned: int, reserved: int, gone: bool = False
    ) -> None:
        if (entry.numbers, entry.gone) == ((granted, used, returned, reserved), gone):
            return
        counted = entry.counted
        entry.granted, entry.used, entry.returned, entry.reserved = granted, used, returned, reserved
        entry.gone = gone
        self._touched.add(entry)
        added = (new - old for new, old in zip(entry.counted, counted, strict=True))
        self._totals.add(entry.lease, entry.totals, *added)

    def _remove(self, entry: BookEntry) -> None:
        """Forget an account. What it has used stays in the totals; nothing of it is reserved or free."""
        del self._holders[entry.holder].entries[entry.lease, entry.period]
        opened = self._open.get(entry.lease)
        if opened and opened.entries.get(entry.holder) is entry:
            del opened.entries[entry.holder]
        self._touched.discard(entry)
        self._changed[entry.key] = None
        # Slots are free again; other amounts were used, as far as anyone knows.
        charged, reserved, free = entry.counted
        charged = charged if entry.period == SLOTS else 0
        self._totals.add(entry.lease, entry.totals, -charged, -reserved, -free)

    # Grants

    def _grant(self, holder: str, account: Account, now: float, at: float) -> Grant | None:
        lease = account.lease
        quota = self._quotas.get(lease.subject)
        limits = limits_of(quota, lease.kind) if quota else {}
        if not limits:
            return None
        period, opened = self._period(lease, now), self._open_of(lease, now)
        entry = opened.entries.get(holder)
        free = entry.free if entry else 0
        room = min(
            limit - self._totals.at(lease, SPAN_OF.get(name), now).charged for name, limit in limits.items()
        )
        room = max(0, room)
        lacking = max(0, account.need - free)
        given = min(lacking, room)
        if free + given < account.least:
            # A part of a request is of no use here, and may be the rest of another elsewhere.
            given = 0
        unmet = lacking - given
        others = [
            other
            for name, other in opened.entries.items()
            if name != holder and other.free and at - self._holders[name].seen_at <= ASKED_S
        ]
        if unmet and others:
            opened.short_since = at
        short = at - opened.short_since <= SHORT_S
        if not unmet and not short:
            share = (room - given) // (2 * max(1, len(opened.entries)))
            given += min(max(0, account.want - free - given), share)
        if given:
            if entry is None:
                entry = self._enter(holder, lease, period, now)
            entry.closed = False
            self._change(entry, entry.granted + given, entry.used, entry.returned, entry.reserved)
            self.urgent = True
        minute = window_at("minute", now)
        assert quota is not None
        return Grant(
            lease,
            period,
            entry.granted if entry else 0,
            float("inf") if period == SLOTS else minute.ends_at - now,
            (account.need if free + given >= account.least else 0) if short else None,
            unmet,
            bool(unmet and others),
            tuple(self._limit_states(lease, quota, now)),
            len(opened.entries),
        )

    def _limit_states(self, lease: LeaseID, quota: Quota, now: float) -> Iterator[LimitState]:
        for name, limit in limits_of(quota, lease.kind).items():
            total = self._totals.at(lease, SPAN_OF.get(name), now)
            remaining = max(0, limit - total.charged + total.free)
            yield LimitState(name, limit, remaining, total.reserved, total.left_s(now))

    # Windows

    def _period(self, lease: LeaseID, now: float) -> str:
        return SLOTS if lease.kind == "slots" else period_of(window_at("minute", now).starts_at)

    def _open_of(self, lease: LeaseID, now: float) -> _Open:
        period = self._period(lease, now)
        opened = self._open.get(lease)
        if opened is None or opened.period != period:
            opened = self._open[lease] = _Open(period)
        return opened

    def _sweep(self, now: float, at: float) -> None:
        """Free the slots of holders that are gone, and forget what belongs to windows that are over."""
        if at - self._swept_at < SWEEP_S:
            return
        self._swept_at = at
        for name, holder in list(self._holders.items()):
            if at - holder.seen_at <= SILENT_S:
                continue
            for entry in list(holder.entries.values()):
                over = all(total.window.ends_at <= now for total in entry.totals)
                if entry.period == SLOTS or over:
                    self._remove(entry)
                else:
                    self._change(entry, *entry.numbers, gone=True)
            if not holder.entries:
                del self._holders[name]
        self._totals.sweep(now)
        for lease, opened in list(self._open.items()):
            if not opened.entries or opened.period != self._period(lease, now):
                del self._open[lease]

    # State

    def _load(self, state: Mapping[str, str], at: float) -> None:
        accounts = []
        for text, value in state.items():
            if text == "clock":
                self.last_seen = float(json.loads(value))
                continue
            kind, *parts = json.loads(text)
            if kind == "account":
                accounts.append((parts, json.loads(value)))
                continue
            subject, thing, span = parts
            self._totals.restore(LeaseID(subject, thing), span, value)
        now = self.last_seen
        for (subject, thing, period, name), (*values, windows) in accounts:
            lease = LeaseID(subject, thing)
            found = [self._totals.since(lease, span, starts_at) for span, starts_at in windows]
            granted, used, returned, reserved, closed = values
            totals = tuple(total for total in found if total)
            amounts = int(granted), int(used), int(returned), int(reserved)
            entry = BookEntry(lease, period, name, totals, *amounts, closed=closed)
            self._holders.setdefault(name, _Holder(at)).entries[lease, period] = entry
            # Its use is in the stored totals already.
            for total in entry.totals:
                total.reserved += entry.reserved
                total.free += entry.free
            if period == self._period(lease, now):
                self._open_of(lease, now).entries[name] = entry
