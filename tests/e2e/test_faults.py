"""What dies or hangs under a steady load, and what the clients see of it.

SATURATE_FAULTS=5 makes it the long form: every fault, five times each.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.e2e.service import Service
from tests.e2e.strikes import CORE, LIMIT_S, strike

pytestmark = pytest.mark.last(4)

TIMES = int(os.environ.get("SATURATE_FAULTS", "0"))
ENGINE = "ServeReplica:llm:Engine:demo"
INGRESS = "ServeReplica:llm:Ingress"
PROXY = "bin/haproxy"
CONTROLLER = "ServeController"


@dataclass(frozen=True)
class Fault:
    """What is done to one process of a service.

    Attributes:
        victim: A word of its command line.
        sends: The signal.
        breaks: Whether a failure that clients see may be its doing, by the kind of the request and whether
            its answer had begun.
        answered: A failure that may be the answer of what took its place.
        in_short: The short form has it too.
    """

    victim: str
    sends: signal.Signals = signal.SIGKILL
    breaks: Callable[[str, bool], bool] = lambda kind, begun: False
    answered: str = ""
    in_short: bool = False


FAULTS = {
    "death of the Serve controller": Fault(CONTROLLER, in_short=True),
    # What went through it is broken off with it; what had not begun, HAProxy sends to the other one.
    "death of the Ingress replica": Fault(INGRESS, breaks=lambda kind, begun: begun, in_short=True),
    "hang of the engine": Fault(CORE, signal.SIGSTOP, in_short=True),
    "death of the Engine replica": Fault(ENGINE),
    "death of EngineCore": Fault(CORE),
    # There is one on a machine: who calls is turned away until the next one runs, and for a moment it knows
    # no application.
    "death of HAProxy": Fault(PROXY, breaks=lambda kind, begun: True, answered="status 404"),
}
CASES = [name for name, fault in FAULTS.items() if TIMES or fault.in_short] * max(1, TIMES)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", CASES)
async def test_who_asks_meanwhile_gets_an_answer(name: str, pair: Service) -> None:
    fault = FAULTS[name]
    engines = pair.pids(CORE)
    found = await strike(pair, fault.victim, fault.sends)
    print(f"{name}: recovered in {found.recovered_s:.1f} s; {found.load.summary()}", flush=True)
    if fault.victim not in (CORE, ENGINE):
        assert pair.pids(CORE) == engines, "the Engines had no part in it"
    failures = found.load.failures()
    assert [one for one in failures if not fault.breaks(one.kind, one.begun)] == []
    # Broken off, or turned away; but never as if complete.
    assert {one.failure for one in failures} <= {
        "RemoteProtocolError",
        "ReadError",
        "ConnectError",
        "WriteError",
        fault.answered,
    }
