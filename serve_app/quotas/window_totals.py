"""Totals of all accounts, by lease and by calendar window."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.quotas.messages import Kind, LeaseID
from serve_app.quotas.windows import Span, Window, window_at

SPANS: dict[Kind, tuple[Span, ...]] = {
    "tokens": ("minute", "day", "month"),
    "requests": ("minute",),
    "slots": (),
}
"""The windows in which each kind counts, limited or not: a limit that is set later finds them right."""

_ALWAYS = Window("minute", 0, 1 << 62)
"""The window of slots."""


@dataclass(slots=True, eq=False)
class Total:
    """The amounts of all accounts in one window of a lease."""

    window: Window
    charged: int = 0
    reserved: int = 0
    free: int = 0

    @property
    def span(self) -> Span | None:
        """The length of the window; None: it is that of slots."""
        return None if self.window is _ALWAYS else self.window.span

    def left_s(self, now: float) -> float:
        """Return the seconds to the end of the window; 0: it has none."""
        return 0.0 if self.window is _ALWAYS else self.window.ends_at - now


class WindowTotals:
    """The totals of all leases, and those that have changed since they were saved."""

    def __init__(self) -> None:
        self._totals: dict[tuple[LeaseID, Span | None], Total] = {}
        self._touched: set[tuple[LeaseID, Span | None]] = set()
        self._deleted: set[tuple[LeaseID, Span | None]] = set()

    def at(self, lease: LeaseID, span: Span | None, now: float) -> Total:
        """Return the total of the window that holds a time, in seconds since the epoch."""
        total = self._totals.get((lease, span))
        if total is None or now >= total.window.ends_at:
            total = self._totals[lease, span] = Total(_window(span, now))
        return total

    def since(self, lease: LeaseID, span: Span | None, starts_at: int) -> Total | None:
        """Return the total of the window that starts then; None: it is over."""
        total = self._totals.get((lease, span))
        return total if total is not None and total.window.starts_at == starts_at else None

    def of(self, lease: LeaseID, now: float) -> list[Total]:
        """Return the totals of all windows in which a lease counts."""
        return [self.at(lease, span, now) for span in _spans(lease)]

    def add(self, lease: LeaseID, totals: Iterable[Total], charged: int, reserved: int, free: int) -> None:
        """Add to totals of a lease."""
        for total in totals:
            total.charged += charged
            total.reserved += reserved
            total.free += free
        self._touched.update((lease, span) for span in _spans(lease))

    def sweep(self, now: float) -> None:
        """Forget the windows that are over."""
        for key, total in list(self._totals.items()):
            if total.window.ends_at <= now:
                del self._totals[key]
                self._deleted.add(key)

    def restore(self, lease: LeaseID, span: Span | None, text: str) -> None:
        """Take over a total as `take_changes` has returned it."""
        starts_at, charged = json.loads(text)
        self._totals[lease, span] = Total(_window(span, starts_at), int(charged))

    def take_changes(self) -> dict[str, str | None]:
        """Return what has changed since the last call, by key; None: the key is deleted."""
        changed: dict[str, str | None] = {_key(*key): None for key in self._deleted}
        for key in self._touched:
            if (total := self._totals.get(key)) is not None:
                changed[_key(*key)] = json.dumps([total.window.starts_at, total.charged])
        self._deleted.clear()
        self._touched.clear()
        return changed


def _spans(lease: LeaseID) -> tuple[Span | None, ...]:
    return SPANS[lease.kind] or (None,)


def _window(span: Span | None, at: float) -> Window:
    return _ALWAYS if span is None else window_at(span, at)


def _key(lease: LeaseID, span: Span | None) -> str:
    return json.dumps(["sum", *lease, span])
