"""Rota: whose turn it is on a device, by the entries of the engines that share it. Times are passed in."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from serve_app.settings.turns import ShareSettings
from serve_app.turns.schedule import NO_TIER, Awake, TurnLimits, Waiting, expected_s, next_turn

State = Literal["starting", "loading", "awake", "draining", "asleep", "waking", "failed"]
"""State of an engine: it waits for its first turn, loads, runs, finishes running requests, sleeps, wakes up,
or has failed."""

HOLDING = frozenset[State]({"loading", "awake", "draining", "waking"})
"""States in which an engine has the memory of its devices."""

SILENT_S = 2.5
"""Age in seconds from which on an entry counts as no wait: twice the longest pause between two entries."""


class Entry(Struct, frozen=True):
    """State and work of an engine. Times are of the machine's monotonic clock, in seconds.

    Attributes:
        group: Its group.
        devices: Its devices. Engines of a group that have a device in common take turns.
        state: Its state.
        at: When the engine wrote the entry.
        busy: Whether requests run or wait.
        tokens: Tokens that wait.
        tier: The most urgent tier of the waiting requests.
        since: Time from which on work has waited for a turn; None: none waits.
        deadline: The first deadline of a waiting request; None: there is no deadline.
        left_s: Estimated seconds until all waiting requests have started.
        began: When its turn began.
        freed: When it gave its devices back; 0: never.
        next: The engine to which it gives way, or gave way; empty: none.
        drain_s: The longest of its latest waits for running requests, in seconds.
        sleep_s: Seconds that its last sleep took to begin; 0: not known.
        wake_s: Seconds that its last wake-up took; 0: not known.
    """

    group: str
    devices: tuple[str, ...]
    state: State
    at: float
    busy: bool = False
    tokens: int = 0
    tier: int = 0
    since: float | None = None
    deadline: float | None = None
    left_s: float = 0.0
    began: float = 0.0
    freed: float = 0.0
    next: str = ""
    drain_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0

    def shares(self, other: "Entry") -> bool:
        """Return whether this engine takes turns with another engine."""
        return self.group == other.group and not set(self.devices).isdisjoint(other.devices)

    def waiting(self, now: float) -> Waiting | None:
        """Return its work, if it waits for a turn; None: it doesn't wait, or is silent."""
        wants = self.state == "starting" or (self.state == "asleep" and self.busy)
        if not wants or now - self.at > SILENT_S:
            return None
        since = self.at if self.since is None else self.since
        return Waiting(since, self.tokens, self.tier, self.deadline)

    def awake(self, now: float) -> Awake | None:
        """Return its work, if it has the devices; None: it gives way already."""
        if self.next:
            return None
        if self.state != "awake":
            # It has just got the devices.
            return Awake(now, True)
        return Awake(self.began, self.busy, self.tokens, self.tier if self.tokens else NO_TIER, self.left_s)


class Order(NamedTuple):
    """The next act of an engine.

    Attributes:
        entry: Its entry, with the state from now on.
        wait_s: Expected seconds until its turn.
        still_from: Time from which on its devices do no work that its turn could have done.
    """

    entry: Entry
    wait_s: float = 0.0
    still_from: float = 0.0


def follow(now: float, name: str, own: Entry, others: Mapping[str, Entry], settings: ShareSettings) -> Order:
    """Return what an engine does next: it goes on, gives way, or takes its devices.

    An engine takes all of its devices at once, and only if no other engine has any of them.

    Args:
        now: The time.
        name: The engine.
        own: Its entry.
        others: The entries of the other engines of the machine.
        settings: The settings of its group.
    """
    rivals = {other: entry for other, entry in others.items() if entry.shares(own)}
    everyone = {**rivals, name: own}
    limits = _limits(everyone, settings)
    waiting = {each: one for each, entry in everyone.items() if (one := entry.waiting(now))}
    if own.state in {"awake", "draining"}:
        # Requests that come while it drains change nothing, as long as the next engine still waits.
        following = own.next if own.next in waiting else _next(now, own, waiting, limits)
        if not following:
            return Order(replace(own, state="awake", next=""))
        wait_s = expected_s(now, name, None, waiting, limits)
        return Order(replace(own, state="draining", next=following), wait_s)
    last = max(everyone.values(), key=lambda entry: entry.freed)
    holders = [entry for entry in rivals.values() if entry.state in HOLDING]
    if name in waiting and not holders:
        first = last.next if last.next in waiting else next_turn(now, None, waiting, limits)
        if first == name:
            state: State = "loading" if own.state == "starting" else "waking"
            still_from = max(last.freed - last.sleep_s, waiting[name].since) if last.freed else now
            return Order(replace(own, state=state, next=""), still_from=still_from)
    awake = [entry.awake(now) for entry in holders] or [None]
    return Order(own, max(expected_s(now, name, one, waiting, limits) for one in awake))


def _next(now: float, own: Entry, waiting: Mapping[str, Waiting], limits: TurnLimits) -> str | None:
    return next_turn(now, replace(own, state="awake", next="").awake(now), waiting, limits)


def _limits(entries: Mapping[str, Entry], settings: ShareSettings) -> TurnLimits:
    """Return the settings, and the measured cost of a switch."""
    sleep_s, wake_s, drain_s = (
        max(getattr(entry, part) for entry in entries.values()) for part in ("sleep_s", "wake_s", "drain_s")
    )
    still_s = sleep_s + wake_s
    return TurnLimits(settings.min_turn_s, settings.max_wait_s, still_s + drain_s, still_s)
