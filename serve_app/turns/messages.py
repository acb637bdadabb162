"""Messages between the engines of a group and the deployment that gives them turns."""

from typing import Literal, NamedTuple

State = Literal["starting", "loading", "awake", "draining", "asleep", "waking", "failed"]
"""State of an engine: it waits for its first turn, loads, runs, finishes running requests, sleeps, wakes up,
or has failed."""

HOLDING = frozenset[State]({"loading", "awake", "draining", "waking"})
"""States in which an engine has the memory of the device."""


class TurnDemand(NamedTuple):
    """The work of an engine. Times are spans: clocks of two processes differ.

    Attributes:
        busy: Requests run or wait.
        tokens: Tokens that wait.
        tier: The most urgent tier of the waiting requests.
        waited_s: Seconds for which work has waited for a turn; 0 while it is awake.
        deadline_s: Seconds until the first deadline of a waiting request; None: no deadline.
        left_s: Estimated seconds until all waiting requests have started.
    """

    busy: bool = False
    tokens: int = 0
    tier: int = 0
    waited_s: float = 0.0
    deadline_s: float | None = None
    left_s: float = 0.0


class TurnReport(NamedTuple):
    """The report of an engine.

    Attributes:
        group: Its group.
        device: The device, by node and visible GPUs.
        replica: Its replica, by the full name of the actor.
        model: Its model.
        number: Count of its reports, to ignore a late report.
        state: Its state.
        demand: Its work.
        sleep_s: Seconds that its last sleep took to begin; 0: not known.
        wake_s: Seconds that its last wake-up took; 0: not known.
    """

    group: str
    device: str
    replica: str
    model: str
    number: int
    state: State
    demand: TurnDemand = TurnDemand()
    sleep_s: float = 0.0
    wake_s: float = 0.0


class Order(NamedTuple):
    """The answer to a report.

    Attributes:
        yours: The engine has the device: it loads, wakes up, or stays awake. Otherwise it finishes the
            running requests, and sleeps.
        wait_s: Expected seconds until its turn.
    """

    yours: bool
    wait_s: float = 0.0
