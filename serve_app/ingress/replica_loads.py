"""The load of each replica in tokens, as one caller knows it."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

UNTAKEN_S = 60.0
"""Seconds after which a call that no replica has taken is given up: its caller may have left in between."""


@dataclass(slots=True, eq=False)
class Charge:
    """The tokens of one call on one replica.

    Attributes:
        call: The id of the call; calls of one HTTP request share it.
        replica: The replica.
        tokens: The tokens.
        at: When the replica was chosen.
        chunk: The last hash of its prompt that was known already; None: there was none.
        taken: The replica has taken the call, or the call has ended.
    """

    call: str
    replica: str
    tokens: int
    at: float
    chunk: int | None = None
    taken: bool = False


class ReplicaLoads:
    """Tokens of this caller's calls on each replica, and what the replicas report of all callers.

    The two are not added: a report is seconds old, and callers that follow it all send to the replica that
    was the least loaded then. The reports tell how much of the traffic is this caller's.

    Attributes:
        tokens: This caller's tokens on each replica.
        reported: Each replica's tokens of all callers, a few seconds ago.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens: dict[str, int] = {}
        self.reported: dict[str, int] = {}
        self._total = 0
        self._sharing: Counter[tuple[str, int | None]] = Counter()
        self._charges: dict[str, list[Charge]] = {}
        self._untaken: deque[Charge] = deque()
        self._clock = clock

    def add(self, replica: str) -> None:
        """Add a replica without load."""
        self.tokens[replica] = self.reported[replica] = 0

    def remove(self, replica: str) -> None:
        """Forget a replica and what was charged to it."""
        for charge in [one for charges in self._charges.values() for one in charges]:
            if charge.replica == replica:
                self.release(charge)
        del self.tokens[replica], self.reported[replica]

    def share(self) -> float:
        """Return how much of the load of all replicas is this caller's, from 0 to 1."""
        reported = sum(self.reported.values())
        return self._total / reported if self._total < reported else 1.0

    def sharing(self, replica: str, chunk: int) -> int:
        """Return how many calls on a replica share a prefix, and nothing longer, with others."""
        return self._sharing[replica, chunk]

    def charge(self, call: str, replica: str, tokens: int, chunk: int | None = None) -> Charge:
        """Add a call to the replica that is chosen for it."""
        now = self._clock()
        while self._untaken and (self._untaken[0].taken or now - self._untaken[0].at > UNTAKEN_S):
            lost = self._untaken.popleft()
            if not lost.taken:
                self.release(lost)
        charge = Charge(call, replica, tokens, now, chunk)
        self._charges.setdefault(call, []).append(charge)
        self._untaken.append(charge)
        self._change(charge, 1)
        return charge

    def move(self, charge: Charge, replica: str) -> None:
        """Put a call on the replica that it was sent to, if that isn't the one that was chosen."""
        if charge.replica != replica and charge in self._charges.get(charge.call, ()):
            self._change(charge, -1)
            charge.replica = replica
            self._change(charge, 1)

    def take(self, call: str, replica: str) -> None:
        """Note that a replica has taken a call: its end will be told.

        Of several with one id it has taken one: the end of another, whose caller has left before, is never
        told.
        """
        for charge in self._charges.get(call, ()):
            if charge.replica == replica and not charge.taken:
                charge.taken = True
                return

    def end(self, call: str, replica: str) -> None:
        """Take a call that has ended off its replica. One that was never charged is ignored."""
        for charge in self._charges.get(call, ()):
            if charge.replica == replica:
                self.release(charge)
                return

    def release(self, charge: Charge) -> None:
        """Take a call off its replica; a second time does nothing."""
        charges = self._charges.get(charge.call, [])
        if charge not in charges:
            return
        charges.remove(charge)
        if not charges:
            del self._charges[charge.call]
        charge.taken = True
        self._change(charge, -1)

    def _change(self, charge: Charge, calls: int) -> None:
        if charge.replica not in self.tokens:
            return
        self.tokens[charge.replica] += calls * charge.tokens
        self._total += calls * charge.tokens
        if charge.chunk is not None:
            place = charge.replica, charge.chunk
            self._sharing[place] += calls
            if not self._sharing[place]:
                del self._sharing[place]
