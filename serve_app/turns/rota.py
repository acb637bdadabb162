"""Rota: the turns of the engines on one device. Time is passed in."""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from serve_app.turns.messages import HOLDING, Order, TurnReport
from serve_app.turns.schedule import NO_TIER, Awake, TurnLimits, Waiting, expected_s, next_turn

RECENT = 8
"""Number of latest drains whose longest is the estimate of the next drain."""


@dataclass(slots=True)
class Member:
    """An engine of the device.

    Attributes:
        report: Its last report.
        at: Time at which the report came.
    """

    report: TurnReport
    at: float

    @property
    def waiting(self) -> Waiting | None:
        """Its work, if it waits for a turn; None: it doesn't wait."""
        demand = self.report.demand
        if self.report.state == "starting":
            return Waiting(self.at - demand.waited_s)
        if not demand.busy or self.report.state != "asleep":
            return None
        deadline = None if demand.deadline_s is None else self.at + demand.deadline_s
        return Waiting(self.at - demand.waited_s, demand.tokens, demand.tier, deadline)


class Rota:
    """Gives the device to one engine at a time.

    An engine holds the device from the order on until it reports that it sleeps, or is removed: a silent
    engine may still have memory of the device.

    Attributes:
        members: The engines, by replica.
        holder: The replica that has the device; None: it is free.
        turns: Turns that have begun, by model.
        still_s: Seconds in which switches kept the device from work, by the model whose turn they began.

    Args:
        min_turn_s: See `TurnLimits`.
        max_wait_s: See `TurnLimits`.
        opens_at: Time before which a free device is not assigned: its holder may not have reported yet.
    """

    def __init__(self, min_turn_s: float, max_wait_s: float, opens_at: float = float("-inf")) -> None:
        self._min_turn_s = min_turn_s
        self._max_wait_s = max_wait_s
        self._opens_at = opens_at
        self.members: dict[str, Member] = {}
        self.holder: str | None = None
        self.turns: Counter[str] = Counter()
        self.still_s: defaultdict[str, float] = defaultdict(float)
        self._next: str | None = None
        self._began = self._stopped = 0.0
        self._freed = self._still_from = float("-inf")
        self._drains: deque[float] = deque([0.0], RECENT)

    @property
    def limits(self) -> TurnLimits:
        """The settings, and the measured cost of a switch."""
        reports = [member.report for member in self.members.values()]
        still = max((one.sleep_s for one in reports), default=0.0) + max(
            (one.wake_s for one in reports), default=0.0
        )
        return TurnLimits(self._min_turn_s, self._max_wait_s, still + max(self._drains), still)

    def exchange(self, report: TurnReport, now: float) -> Order:
        """Apply a report, decide, and return the order for the engine."""
        known = self.members.get(report.replica)
        if known is None or known.report.number < report.number:
            self.members[report.replica] = Member(report, now)
            if report.replica == self.holder or (self.holder is None and report.state in HOLDING):
                self._hold(report, known.report.state if known else None, now)
        self._decide(now)
        if report.replica == self.holder and self._next is None:
            return Order(True)
        # A holder that has just got the device counts as awake from now on.
        awake = None if self._next or not self.holder else self._awake() or Awake(now, True)
        return Order(False, expected_s(now, report.replica, awake, self._others(), self.limits))

    def remove(self, replica: str, now: float) -> None:
        """Forget an engine whose process has ended."""
        del self.members[replica]
        if replica == self.holder:
            self._free(now)
        elif replica == self._next:
            self._next = None
        self._decide(now)

    def _hold(self, report: TurnReport, before: str | None, now: float) -> None:
        """Update the rota with a report of the engine that has the device."""
        if self.holder is None:
            # The engine had the device before this rota began.
            self._freed = self._still_from = now
        self.holder = report.replica
        if report.state == "awake" and before not in {"awake", "draining"}:
            self._began = now
            self.turns[report.model] += 1
            if before == "waking":
                self.still_s[report.model] += now - self._still_from
        elif report.state == "failed":
            self._free(now)
        elif report.state == "asleep" and before in HOLDING:
            # The model that was to be next may have no more work.
            if self._next is not None:
                self._drains.append(max(0.0, now - self._stopped - report.sleep_s))
            self._free(now, report.sleep_s)

    def _free(self, now: float, sleep_s: float = 0.0) -> None:
        self.holder = None
        self._freed, self._still_from = now, now - sleep_s

    def _decide(self, now: float) -> None:
        others = self._others()
        if self.holder is None:
            if now >= self._opens_at or self._next is not None:
                chosen = self._next if self._next in others else next_turn(now, None, others, self.limits)
                self.holder, self._next = chosen, None
                if now > self._freed:
                    # Until now no model had work.
                    self._freed = self._still_from = now
            return
        awake = self._awake()
        if awake is None or self._next in others:
            return
        # The model that was to be next may have no more work.
        before, self._next = self._next, next_turn(now, awake, others, self.limits)
        if before is None and self._next is not None:
            self._stopped = now

    def _awake(self) -> Awake | None:
        if self.holder is None:
            return None
        report = self.members[self.holder].report
        if report.state not in {"awake", "draining"}:
            return None
        demand = report.demand
        tier = demand.tier if demand.tokens else NO_TIER
        return Awake(self._began, demand.busy, demand.tokens, tier, demand.left_s)

    def _others(self) -> dict[str, Waiting]:
        return {
            name: waiting
            for name, member in self.members.items()
            if name != self.holder and (waiting := member.waiting) is not None
        }
