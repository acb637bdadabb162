"""Deaths and hangs of processes under a steady load, as the clients see them."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.e2e.fault_injection import CORE, LIMIT_S, inject, wait_until_whole
from tests.e2e.load import Load
from tests.e2e.service import Service

pytestmark = pytest.mark.long

TIMES = 2
"""How often each fault is injected."""

ENGINE = "ServeReplica:llm:Engine:demo"
INGRESS = "ServeReplica:llm:Ingress"
PROXY = "bin/haproxy"
CONTROLLER = "ServeController"


@dataclass(frozen=True)
class Fault:
    """A signal to one process of a service.

    Attributes:
        victim: A word of its command line.
        sends: The signal.
        breaks: Whether it may cause a failure that clients see, by the kind of the request and whether its
            answer had begun.
        answered: A failure that may be the answer of the process that took its place.
    """

    victim: str
    sends: signal.Signals = signal.SIGKILL
    breaks: Callable[[str, bool], bool] = lambda kind, begun: False
    answered: str = ""


FAULTS = {
    "death of the Serve controller": Fault(CONTROLLER),
    # All its requests are lost with it: HAProxy sends none of them on, since one may be the cause.
    "death of the Ingress replica": Fault(INGRESS, breaks=lambda kind, begun: True, answered="status 503"),
    "hang of the engine": Fault(CORE, signal.SIGSTOP),
    "death of the Engine replica": Fault(ENGINE),
    "death of EngineCore": Fault(CORE),
    # A machine has one: clients are turned away until the next one runs, and for a moment it knows no
    # application.
    "death of HAProxy": Fault(PROXY, breaks=lambda kind, begun: True, answered="status 503"),
}
HELD_S = 32.0
"""Seconds for which processes stand still: half of what an Engine may be silent."""


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("time", range(TIMES))
async def test_clients_get_their_answers(name: str, time: int, pair: Service) -> None:
    fault = FAULTS[name]
    await asyncio.to_thread(wait_until_whole, pair)
    engines = pair.pids(CORE)
    found = await inject(pair, fault.victim, fault.sends)
    print(f"{name}: recovered in {found.recovered_s:.1f} s; {found.load.summary()}", flush=True)
    if fault.victim not in (CORE, ENGINE):
        assert pair.pids(CORE) == engines, "the Engines had no part in it"
    failures = found.load.failures()
    assert [one for one in failures if not fault.breaks(one.kind, one.begun)] == []
    # Broken off, or turned away; but never an answer that seems complete.
    assert {one.failure for one in failures} <= {
        "RemoteProtocolError",
        "ReadError",
        "ConnectError",
        "WriteError",
        fault.answered,
    }


async def test_engines_that_stand_still_lose_no_request(pair: Service) -> None:
    await asyncio.to_thread(wait_until_whole, pair)
    engines = pair.pids(ENGINE)
    load = Load(pair.url)
    await load.learn()
    async with load.running():
        await load.wait_for(6)
        # All of them, as where Python holds their event loops: no other one could take the requests.
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(HELD_S)
        finally:
            for pid in engines:
                os.kill(pid, signal.SIGCONT)
        await load.wait_for(12, LIMIT_S)
    print(f"standing still for {HELD_S} s: {load.summary()}", flush=True)
    assert load.failures() == []
    assert pair.pids(ENGINE) == engines
