"""Runs of the live service on a simulated device."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_app.simulation.profiles import Profile
from serve_app.tuning.service import Service
from tests.benchmarks.measuring import progress
from tests.benchmarks.plan.load import Generator, LoadLevel, LoadStep, Requests
from tests.benchmarks.plan.loads import Level
from tests.benchmarks.plan.planned import planned
from tests.benchmarks.serve.groups import CLIENT
from tests.benchmarks.serve.models import simulated
from tests.benchmarks.serve.running import Server, with_log
from tests.benchmarks.serve.servers import saturate

MODEL_ID = "demo"
"""Id of the model in configs/local.yaml."""

DRAIN_S = 240.0
"""Most seconds until the last request that counts is answered."""

WARM_UP = LoadLevel("closed", 4)
WARM_UP_S = 5.0
"""The load of a service that has just started, for code paths and connections, and its seconds."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of the service, and what the model says about the same requests.

    Attributes:
        live: The run.
        planned: The same requests in the model.
        cpu: Share of the machine's cores that each group of processes took, 0 to 1.
    """

    live: LoadStep
    planned: LoadStep
    cpu: Mapping[str, float]

    @property
    def cpu_share(self) -> float:
        """Share of the machine's cores that all of them took, 0 to 1."""
        return sum(self.cpu.values())


def measure(
    profile: Profile,
    levels: Sequence[Level],
    folder: Path,
    *,
    rounds: int,
    seconds: float,
    after: Callable[[Mapping[str, Sequence[Pair]]], None],
) -> None:
    """Run all levels in each round on one service, each round in another order.

    Args:
        profile: The device.
        levels: The loads.
        folder: Folder for files of the service.
        rounds: Rounds; each has other random numbers.
        seconds: Seconds of a run that count.
        after: Called after each run, with the pairs of all levels so far by name.

    Raises:
        UnavailableError: The service didn't start, or a request failed.
    """
    found: dict[str, list[Pair]] = {}
    progress(f"{profile.name}: starting the service")
    with saturate(simulated(profile), folder) as server:
        with with_log(server, "the warm-up"):
            requests = Requests(MODEL_ID, levels[0].case.input, levels[0].case.output)
            asyncio.run(_step(server, requests, WARM_UP, 0.0, WARM_UP_S, seed=0))
        for number in range(1, rounds + 1):
            turn = number % len(levels)
            for place in [*range(turn, len(levels)), *range(turn)]:
                level = levels[place]
                progress(f"{profile.name}: round {number} of {rounds}, {level}")
                # No two runs have a prompt in common, which would be in the prefix cache.
                seed = 1_000 * number + place
                with with_log(server, level.name):
                    pair = run(server, profile, level, seconds=seconds, seed=seed)
                found.setdefault(level.name, []).append(pair)
                after(found)
    progress("")


def run(server: Server, profile: Profile, level: Level, *, seconds: float, seed: int) -> Pair:
    """Run a load on the service and in the model.

    Raises:
        RuntimeError: Requests failed, or were not answered in time.
    """
    requests = Requests(MODEL_ID, level.case.input, level.case.output)
    model = planned(profile, level, requests, seconds=seconds, seed=seed)
    before, began = server.usage(), time.monotonic()
    own = time.process_time()
    live = asyncio.run(_step(server, requests, level.step, level.warm_up_s, seconds, seed))
    own, took = time.process_time() - own, time.monotonic() - began
    used = server.usage().since(before) | {CLIENT: own}
    check(live, model)
    cores = os.cpu_count() or 1
    return Pair(live, model, {name: spent / took / cores for name, spent in used.items()})


def check(live: LoadStep, model: LoadStep) -> None:
    """Raise a RuntimeError if the run and the model can't be compared."""
    if live.failed:
        raise RuntimeError(f"{live.failed} of {live.sent} requests failed")
    if live.sent != model.sent:
        raise RuntimeError(f"{live.sent} requests were sent, and the model has {model.sent}")
    if left := live.sent - len(live.samples["latency"]):
        raise RuntimeError(f"{left} of {live.sent} requests were not answered within {DRAIN_S:g} s")


async def _step(
    server: Server, requests: Requests, load: LoadLevel, warm_up: float, seconds: float, seed: int
) -> LoadStep:
    url = f"http://127.0.0.1:{server.port}"
    async with Service(url) as service, Generator(service, requests, ()) as generator:
        return await generator.step(load, seconds=seconds, warm_up=warm_up, drain=DRAIN_S, seed=seed)
