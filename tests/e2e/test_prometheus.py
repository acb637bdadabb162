"""Prometheus on the live service: every query of the dashboard and every rule finds data."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.service import Service
from tests.e2e.services import NODES
from tests.k8s.prometheus import PROMETHEUS, needs_prometheus, queries, rules, write_rules
from tests.ports import free_port
from tests.progress import ANSWER_S, STILL_S, wait_until

QUIET, TRIES = 4, 3
"""Looks, a second apart, for which a counter that stands still is complete; and how often it is tried."""

WINDOW = "30s"
CLIENTS = 4

PAUSE_S = 0.2
"""Seconds between two requests of a client: the machine has time for Ray, the driver and Prometheus."""

EMPTY = {
    "GPUs: {{ip}} {{GpuIndex}}": "there is no GPU here",
    "Pending nodes: {{NodeType}}": "the autoscaler's port belongs to the first Ray of a machine",
    "Rows of datasets per second: {{model}} calls sent again": "there is room for what the driver sends",
    "Rows that gave way: {{model}} left out of a step": "there are places and blocks for all, and no goals",
    "Rows that gave way: {{model}} preempted": "there are places and blocks for all, and no goals",
    "Preemptions: {{model_name}}": "guaranteed_no_evict preempts nothing",
    "Prompt tokens found in the prefix cache: {{model_name}}": "a prompt is shorter than a block",
    "SaturateErrorsFast": "nothing fails",
    "SaturateErrorsSlow": "nothing fails",
    "SaturateFaults": "the service has none",
    "Faults: {{deployment}}": "the service has none",
    "SaturateFirstTokenSlow": "with this load, streams begin in time; a slow machine may say otherwise",
    "SaturateQueueFull": "the queue has room",
    "SaturateEngineHung": "the engine works",
    "SaturateReplicasFlap": "no replica dies",
    "SaturateIdleWhileWorkWaits": "nothing waits for ten minutes",
    "Share of prompt tokens from the cache, by tenant: {{model}} {{tenant}}": "prompts are too short",
    "Usage ledger: {{model}} dropped per second": "no row is lost",
    "SaturateQuotaNear": "the limits are far",
    "Models that are awake on a shared device: {{group}} {{model}}": "no models share a device",
    "Time of shared devices that switches take: {{group}}": "no models share a device",
    "Turns per minute: {{group}} {{model}}": "no models share a device",
    "SaturateUsageLost": "no row is lost",
    "SaturateScaleUpBlocked": "every replica is there",
    "SaturateMetricsMissing": "the metrics are there",
}
"""Queries and rules that may find nothing, with the reason."""


class Prometheus:
    """A Prometheus that scrapes a service.

    Args:
        targets: Where the metrics are.
        folder: Where it keeps its data.
    """

    def __init__(self, targets: list[str], folder: Path) -> None:
        assert PROMETHEUS
        config = {
            # A busy machine takes more than a second to answer a scrape.
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
            "rule_files": [str(write_rules(folder))],
            "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        port = free_port()
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S)
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    # A recorded series is one step behind what it is made of.
                    "--query.lookback-delta=20s",
                ],
                stdout=log,
                stderr=log,
            )

    def find(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an expression that have a value now.

        Raises:
            AssertionError: Prometheus refuses the expression.
        """
        answer = self._http.post("/api/v1/query", data={"query": expr}).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        series: list[dict[str, Any]] = answer["data"]["result"]
        return [one for one in series if not math.isnan(float(one["value"][1]))]

    def ready(self) -> bool:
        """Return whether it answers."""
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            assert self._process.poll() is None, self.log.read_text()
            return False

    def failing(self) -> list[str]:
        """Return the error of each target whose last scrape failed."""
        targets = self._http.get("/api/v1/targets").json()["data"]["activeTargets"]
        return [f"{one['scrapeUrl']}: {one['lastError']}" for one in targets if one["lastError"]]

    def rules(self) -> list[dict[str, Any]]:
        """Return its rules, each with its health."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(STILL_S)
        self._http.close()


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(service.run_python(NODES), tmp_path_factory.mktemp("prometheus"))
    yield server
    server.stop()


async def load(service: Service, enough: asyncio.Event) -> None:
    """Send requests of all kinds, some of them wrong, until `enough` is set."""
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:

        async def ask(number: int) -> None:
            while not enough.is_set():
                body = {
                    "model": "demo",
                    "prompt": f"What is {number}+1?",
                    "max_tokens": 16,
                    "ignore_eos": True,
                    "stream": number % 2 == 0,
                    "service_tier": ("default", "flex", "priority")[number % 3],
                }
                await client.post("/v1/completions", json=body, headers={"x-tenant": f"team-{number % 4}"})
                await asyncio.sleep(PAUSE_S)

        async def ask_others() -> None:
            while not enough.is_set():
                await client.post("/process", json={"model": "minilm", "records": ["a", "a b c", "a b"]})
                await client.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": -1})
                # Too late before it can start: a record that the batcher turns away.
                headers = {"x-queue-timeout-seconds": "0.000001"}
                await client.post("/generate", json={"model": "demo", "prompts": ["x"]}, headers=headers)
                await leave()
                await send_batch()
                await asyncio.sleep(PAUSE_S)

        async def leave() -> None:
            body = {"model": "demo", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    return

        async def send_batch() -> None:
            url = "/v1/completions"
            row = {"custom_id": "1", "method": "POST", "url": url, "body": {"model": "demo", "prompt": "x"}}
            files = {"file": ("rows.jsonl", json.dumps(row).encode())}
            file = await client.post("/v1/files", files=files, data={"purpose": "batch"})
            body = {"input_file_id": file.json()["id"], "endpoint": url, "completion_window": "24h"}
            assert (await client.post("/v1/batches", json=body)).is_success

        await asyncio.gather(*(ask(number) for number in range(CLIENTS)), ask_others())


@contextmanager
def dataset_under_way(service: Service, folder: Path) -> Iterator[None]:
    """Have a driver send a dataset through the handle."""
    (folder / "in.jsonl").write_text('{"prompt": "What is 1+1?"}\n' * 100_000)
    way = ["--app", "llm", "--model", "demo", "--max-concurrency", "16", "--quiet"]
    files = [str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    command = [sys.executable, "-m", "serve_app.cli", "batch", *files, *way]
    with subprocess.Popen(command, env=service.ray_env()) as driver:
        try:
            yield
            assert driver.poll() is None, "it ended"
        finally:
            driver.kill()


@needs_prometheus
async def test_every_query_and_every_rule_finds_data_or_is_known_not_to(
    service: Service, prometheus: Prometheus, tmp_path: Path
) -> None:
    asked = dict(queries(WINDOW))
    asked |= {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
    assert set(EMPTY) <= set(asked)
    missing = dict(asked)
    enough = asyncio.Event()
    loading = asyncio.ensure_future(load(service, enough))
    try:
        found_at = time.monotonic()
        with dataset_under_way(service, tmp_path):
            while set(missing) - set(EMPTY) and time.monotonic() - found_at < STILL_S:
                assert not loading.done(), loading.exception()
                await asyncio.sleep(1)
                if await asyncio.to_thread(prometheus.ready):
                    for name, expr in list(missing.items()):
                        if await asyncio.to_thread(prometheus.find, expr):
                            del missing[name]
                            found_at = time.monotonic()
    finally:
        enough.set()
        await loading
    unexpected = sorted(set(missing) - set(EMPTY))
    assert not unexpected, f"{unexpected}; targets that fail: {prometheus.failing()}"
    for rule in prometheus.rules():
        assert rule["health"] == "ok", rule
    firing = {rule["name"] for rule in prometheus.rules() if rule.get("state") == "firing"}
    assert firing <= {"SaturateFirstTokenSlow"}


def value(prometheus: Prometheus, expr: str) -> float:
    """Return the value of an expression of one series; 0 while there is none."""
    found = prometheus.find(expr)
    return float(found[0]["value"][1]) if found else 0.0


@needs_prometheus
def test_every_counter_grows_by_what_was_produced(service: Service, prometheus: Prometheus) -> None:
    counters = [
        'sum(ray_saturate_records_total{model="demo", outcome="completed"}) * 16',
        'sum(ray_saturate_output_tokens_total{model="demo"})',
        'sum(ray_vllm_generation_tokens_total{model_name="demo"})',
        'sum(ray_saturate_request_seconds_count{model="demo"}) * 16',
        'sum(ray_vllm_e2e_request_latency_seconds_count{model_name="demo"}) * 16',
    ]

    def has_grown(count: float) -> bool:
        return value(prometheus, counters[0]) > count

    def settled() -> list[float]:
        """Return the counters once they stand still; they take seconds through Ray into Prometheus."""
        seen: list[list[float]] = []

        def stand_still() -> bool:
            seen.append([value(prometheus, expr) for expr in counters])
            return len(seen) > QUIET and seen[-QUIET:] == seen[-1:] * QUIET

        wait_until(stand_still, every_s=1.0)
        return seen[-1]

    body = {"model": "demo", "prompt": "What is 1+1?", "max_tokens": 16, "ignore_eos": True}
    with httpx.Client(base_url=service.url, timeout=ANSWER_S) as client:

        def batcher() -> tuple[int, int]:
            (replica,) = client.get("/stats").json()["models"]["demo"]["replicas"]
            return replica["batcher"]["total_completed"], replica["batcher"]["output_tokens"]

        grown: list[list[float]] = []
        # On a busy machine counts of earlier tests may still be under way: then it is counted again.
        while len(grown) < TRIES and grown[-1:] != [[160.0] * len(counters)]:
            before = settled()
            completed, output = batcher()
            for number in range(10):
                assert client.post("/v1/completions", json=body | {"stream": number % 2 == 0}).is_success
            assert batcher() == (completed + 10, output + 160)
            wait_until(
                partial(lambda before: value(prometheus, counters[0]) > before[0], before), every_s=1.0
            )
            grown.append([after - count for count, after in zip(before, settled(), strict=True)])
    assert grown[-1] == [160.0] * len(counters), grown
