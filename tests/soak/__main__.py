"""A long run of mixed load with faults at random: python -m tests.soak --help."""

import asyncio
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx

from tests.benchmarks import command
from tests.benchmarks.measuring import progress
from tests.benchmarks.report import RESULTS, machine, versions
from tests.e2e.load import BODY, PROMPTS, Load
from tests.e2e.service import Service
from tests.e2e.services import local, use_exact_arithmetic
from tests.soak.memory import Memory

SAMPLE_S = 5.0
HANG_S = 5.0
"""Seconds without a step that are a hang."""

DRAIN_S = 120.0

FAULTS: dict[str, Callable[[Service], object]] = {
    "an Engine replica killed": lambda service: kill_one(service, "ServeReplica:llm:Engine"),
    "an EngineCore killed": lambda service: kill_one(service, "VLLM::EngineCore"),
    "an EngineCore stopped": lambda service: kill_one(service, "VLLM::EngineCore", signal.SIGSTOP),
    "an Ingress replica killed": lambda service: kill_one(service, "ServeReplica:llm:Ingress"),
    "HAProxy killed": lambda service: kill_one(service, "haproxy "),
    "the controller killed": lambda service: kill_one(service, "ServeController"),
}

HONEST = (
    *("ReadError", "RemoteProtocolError", "ConnectError", "an error event"),
    *("status 500", "status 503", "status 404"),
)
"""Failures that a client may see: its connection went through a process that was killed; or it was told that
no Engine was left, or that two were lost with its request; or HAProxy had just started and knew no
application yet. Everything else, above all another text and an answer that never ends, is a defect."""


def kill_one(service: Service, word: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to one process of the service, if there is one."""
    if pids := service.pids(word):
        with suppress(ProcessLookupError):
            os.kill(random.choice(pids), number)


def config() -> dict[str, Any]:
    """Return configs/local.yaml with two of each replica."""
    content, app, model = local()
    use_exact_arithmetic(content)
    model["engine_hang_timeout_s"] = HANG_S
    for deployment in app["deployments"]:
        deployment["num_replicas"] = 2
        deployment["ray_actor_options"]["num_cpus"] = 0
    return content


async def soak(service: Service, minutes: float, every_s: float) -> dict[str, Any]:
    """Run load and faults; return what was seen."""
    load, memory, done = Load(service.url), Memory(), Counter[str]()
    await load.learn()
    end = time.monotonic() + minutes * 60
    fault_at = time.monotonic() + every_s if every_s else math.inf
    async with load.running(streams=4, singles=2, lists=1):
        leaving = asyncio.create_task(leave_early(service.url))
        while (now := time.monotonic()) < end:
            memory.sample(service.commands())
            # The last ones have time to mend before the end.
            if now >= fault_at and now < end - 60:
                name = random.choice(list(FAULTS))
                FAULTS[name](service)
                done[name] += 1
                fault_at = now + random.uniform(0.5, 1.5) * every_s
            failed = len(load.failures())
            progress(
                f"{(end - now) / 60:.1f} minutes left: {len(load.outcomes)} requests, {failed} failed, "
                f"{done.total()} faults"
            )
            await asyncio.sleep(SAMPLE_S)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    progress("")
    return {
        "minutes": minutes,
        "requests": len(load.outcomes),
        "failed": dict(Counter(f"{one.kind}: {one.failure}" for one in load.failures())),
        "faults": dict(done),
        "left_in_flight": await in_flight(service.url),
        "memory": {
            role: {"processes": len(g.spans), "mib": g.mib, "mib_per_hour": g.mib_per_hour, "spans": g.spans}
            for role, g in memory.growth().items()
        },
    }


async def leave_early(url: str) -> None:
    """Begin streams and leave in the middle, again and again: what they held has to come back."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number in range(1_000_000):
            body = BODY | {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 1000, "stream": True}
            try:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        break
            except httpx.HTTPError:
                pass
            await asyncio.sleep(1)


async def in_flight(url: str) -> int:
    """Return the requests that wait or run once nothing is asked any more; it should become 0."""
    left = -1
    end = time.monotonic() + DRAIN_S
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while left and time.monotonic() < end:
            try:
                models = (await client.get("/stats")).json()["models"]
                replicas = [replica["batcher"] for model in models.values() for replica in model["replicas"]]
                left = sum(one["running"] + one["queue_depth"] + one["outside"] for one in replicas)
            except (httpx.HTTPError, KeyError, ValueError):
                left = -1
            await asyncio.sleep(1)
    return left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command.parser(
        "tests.soak",
        "Run mixed load on a service with two of each replica, harm it at random, and look at lost requests, "
        "requests that stayed in flight and growing memory.",
    )
    parser.add_argument(
        "--minutes", type=command.above_0, default=30.0, help="how long; memory takes ten to say anything"
    )
    parser.add_argument(
        "--every", metavar="S", type=float, default=45, help="mean seconds between two faults; 0: none"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults' order")
    options = parser.parse_args(arguments)
    random.seed(options.seed)
    with command.place() as folder:
        service = Service(config(), folder)
        try:
            seen = asyncio.run(soak(service, options.minutes, options.every))
        finally:
            service.stop()
    seen |= {
        "left_behind": service.processes(),
        "machine": machine(),
        "versions": versions(),
    }
    (RESULTS / "soak.json").write_text(json.dumps(seen, indent=1) + "\n")
    print(json.dumps(seen, indent=1))
    wrong = [what for what in seen["failed"] if not what.endswith(HONEST)]
    return 1 if wrong or seen["left_in_flight"] or seen["left_behind"] else 0


if __name__ == "__main__":
    sys.exit(main())
