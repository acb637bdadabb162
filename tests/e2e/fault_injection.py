"""Kills or stops a process of a service under a steady load, and waits until it is replaced."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from functools import partial

import httpx

from tests.e2e.load import Load
from tests.e2e.service import Service
from tests.e2e.services import engines, is_settled, wait_for_replicas, wait_until

LIMIT_S = 240
"""Seconds for the requests that a fault breaks to end, at most."""

CORE = "EngineCore"
"""A word of the command line of vLLM's engine."""


@dataclass
class Recovery:
    """The recovery from a fault.

    Attributes:
        load: All that was asked meanwhile.
        recovered_s: Seconds until the service was whole again.
    """

    load: Load
    recovered_s: float = 0.0


async def inject(service: Service, victim: str, number: signal.Signals) -> Recovery:
    """Signal a process under load, and wait until another has taken its place and all Engines are ready.

    Args:
        service: The service.
        victim: A word of the command line of the process.
        number: The signal that it is sent.
    """
    load = Load(service.url)
    await load.learn()
    others = set(service.pids(victim))
    async with load.running():
        await load.wait_for(6)
        pid = min(others)
        # In the middle of calls, some of which it carries.
        await asyncio.to_thread(wait_until, partial(all_busy, service), every_s=0.05)
        os.kill(pid, number)
        at = time.monotonic()
        await load.wait_for(12, LIMIT_S)
    found = Recovery(load)
    # Fewer clients, so that the new process has a share of the machine.
    async with load.running(streams=1, singles=1, lists=0):
        is_replaced = partial(is_whole, service, victim, pid, len(others))
        await asyncio.to_thread(wait_until, is_replaced, news=service.news(), every_s=0.1)
        found.recovered_s = time.monotonic() - at
        await load.wait_for(2)
    return found


def all_busy(service: Service) -> bool:
    """Return whether each replica of the demo model runs a call."""
    stats = httpx.get(f"{service.url}/stats", timeout=30).json()
    replicas = stats["models"]["demo"]["replicas"]
    return len(replicas) == engines(service.config) and all(one["batcher"]["running"] for one in replicas)


def wait_until_whole(service: Service) -> None:
    """Wait until all Engines run; one may have been killed before."""
    count = engines(service.config)
    wait_until(lambda: len(service.pids(CORE)) == count and is_settled(service), news=service.news())
    wait_for_replicas(service, count)


def is_whole(service: Service, victim: str, gone: int, count: int) -> bool:
    """Return whether as many processes as before run, without the one that was signalled."""
    now = service.pids(victim)
    whole = engines(service.config)
    if gone in now or len(now) != count or len(service.pids(CORE)) != whole:
        return False
    try:
        health = httpx.get(f"{service.url}/health", timeout=30).json()
    except httpx.HTTPError:
        return False
    return bool(health.get("models", {}).get("demo", {}).get("replicas") == whole)
