"""Replicas start and stop with the tokens that calls ask for; two of each share the load."""

import asyncio
import csv
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import progress
from tests.e2e.service import Service
from tests.e2e.services import local, wait_until
from tests.progress import ANSWER_S

pytestmark = pytest.mark.long

REQUESTS = 300

SCALING = {
    "initial_replicas": 1,
    "min_replicas": 0,
    "max_replicas": 2,
    # By calls alone one replica would do: the tests make one at a time, or 32.
    "target_ongoing_requests": 64,
    "policy": {"policy_function": "serve_app.engine.autoscaling:ByTokens", "policy_kwargs": {"target": 0.8}},
    "upscale_delay_s": 1,
    # Two replicas have to stay while they share a load.
    "downscale_delay_s": 15,
    "downscale_to_zero_delay_s": 1,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2,
}

CALL = {"prompts": ["once upon"] * 4_000, "max_tokens": 500, "ignore_eos": True}
"""One call that is more than two replicas can hold."""

ROWS = 100
SUM = '{"prompt": "What is 47+28?"}\n'


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of configs/local.yaml with two Ingress replicas and none to two of the Engine."""
    config, app, _ = local()
    ingress, engine = app["deployments"]
    # Two engines fit on any machine where Ray doesn't count cores.
    ingress |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}
    del engine["num_replicas"]
    engine |= {"autoscaling_config": SCALING, "ray_actor_options": {"num_cpus": 0}}
    service = Service(config, tmp_path_factory.mktemp("scaled"))
    yield service
    service.stop()


class Watch:
    """Notes how many Engine replicas run, all the time."""

    def __init__(self, service: Service) -> None:
        self._url = f"{service.url}/health"
        self.most = 0
        self.now = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        with httpx.Client(timeout=ANSWER_S) as client:
            while not self._ended.wait(0.2):
                count = client.get(self._url).json()["models"]["demo"]["replicas"]
                self.now, self.most = count, max(self.most, count)

    def wait_for(self, count: int) -> float:
        """Return the seconds until so many run."""
        start = time.monotonic()
        wait_until(lambda: self.now == count, tell=lambda: f"{self.now}, not {count}")
        return time.monotonic() - start

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(progress.STILL_S)


@pytest.fixture(scope="module")
def watch(scaled: Service) -> Iterator[Watch]:
    watch = Watch(scaled)
    yield watch
    watch.stop()


async def test_one_call_of_many_prompts_brings_a_second_replica(scaled: Service, watch: Watch) -> None:
    await asyncio.to_thread(watch.wait_for, 1)
    async with httpx.AsyncClient(base_url=scaled.url, timeout=ANSWER_S) as client:
        call = asyncio.create_task(client.post("/generate", json=CALL))
        took = await asyncio.to_thread(watch.wait_for, 2)
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
    print(f"1 -> 2 replicas in {took:.1f} s")


def both(read: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Return what is read of both replicas; an Ingress takes a moment to learn of an Engine."""
    wait_until(lambda: len(read()) >= 2, tell=read)
    return read()


def by_engine(service: Service) -> dict[str, int]:
    """Return how many prompts each of the two Engine replicas has completed."""

    def read() -> dict[str, int]:
        replicas = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["models"]["demo"]["replicas"]
        return {replica["replica"]: replica["batcher"]["total_completed"] for replica in replicas}

    return both(read)


def by_ingress(service: Service) -> dict[str, int]:
    """Return how many requests HAProxy has sent to each of the two Ingress replicas."""
    port = service.env["RAY_SERVE_HAPROXY_STATS_PORT"]

    def read() -> dict[str, int]:
        text = httpx.get(f"http://127.0.0.1:{port}/stats;csv", timeout=ANSWER_S).text
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        return {row["svname"]: int(row["stot"]) for row in rows if "Ingress" in row["svname"]}

    return both(read)


async def ask(service: Service) -> list[Any]:
    """Ask sums, 32 at once, and return the answers."""
    limit = asyncio.Semaphore(32)
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:

        async def one(number: int) -> Any:
            async with limit:
                body = {"prompts": [f"What is {number % 100}+1?"], "max_tokens": 16, "ignore_eos": True}
                return (await client.post("/generate", json=body)).json()

        return await asyncio.gather(*(one(number) for number in range(REQUESTS)))


async def test_both_replicas_of_each_get_their_share(scaled: Service, watch: Watch) -> None:
    await asyncio.to_thread(watch.wait_for, 2)
    engines, ingresses = by_engine(scaled), by_ingress(scaled)
    answers = await ask(scaled)
    assert all(answer["usage"]["completion_tokens"] == 16 for answer in answers)
    after, behind = by_engine(scaled), by_ingress(scaled)
    shares = [after[replica] - before for replica, before in engines.items()]
    fronts = [behind[replica] - before for replica, before in ingresses.items()]
    print(f"prompts by Engine: {shares}; requests by Ingress: {fronts}")
    assert len(shares) == len(fronts) == 2
    assert sum(shares) == REQUESTS
    assert min(shares) >= 0.3 * REQUESTS
    assert sum(fronts) >= REQUESTS
    assert min(fronts) >= 0.3 * sum(fronts)


def test_idle_replicas_stop_and_the_driver_wakes_one(scaled: Service, watch: Watch, tmp_path: Path) -> None:
    took = watch.wait_for(0)
    answers = tmp_path / "answers.jsonl"
    command = [sys.executable, "-m", "serve_app.cli", "batch", "-", str(answers), "--url", scaled.url]
    start = time.monotonic()
    done = progress.run(command, input=SUM * ROWS, check=True)
    print(f"2 -> 0 replicas in {took:.1f} s, the run that woke one took {time.monotonic() - start:.1f} s")
    assert "the model is asleep; the first call wakes it" in done.stderr
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["result"] for row in rows] == ["75"] * ROWS
    watch.wait_for(1)
    assert watch.most == 2
    # A call that may not wait for a replica is answered before there is one.
    watch.wait_for(0)
    late = httpx.post(f"{scaled.url}/generate", json=CALL | {"queue_timeout_s": 0.5}, timeout=ANSWER_S)
    assert late.status_code == 408
    assert watch.now == 0
