"""The services that tests share, each a variation of configs/local.yaml."""

import copy
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from serve_app.api.protocol import JSON
from tests.e2e.service import ROOT, Service
from tests.progress import ANSWER_S, STILL_S
from tests.progress import wait_until as wait_until

LIMIT_S = STILL_S
"""Seconds without anything new after which a wait for a service gives up."""

MINILM: JSON = {
    "id": "minilm",
    "kind": "function",
    "target": "serve_app.demo.minilm:MiniLM",
    "embeddings": True,
    "batcher": {"profile": "variable_length", "target_batch_cost": 4096, "max_batch_size": 64},
}

NODES = """
import json, ray
ray.init(address="auto", logging_level="ERROR")
nodes = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes() if n["Alive"]]
print(json.dumps(nodes))
"""
"""Prints the addresses of the pages with Prometheus metrics; see `Service.run_python`."""

QUEUE = 60
"""Requests that each Engine of the pair lets wait: a few seconds' worth of eight sequences at once."""


def local() -> tuple[JSON, JSON, JSON]:
    """Return configs/local.yaml, its application and its model."""
    config: JSON = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    (app,) = config["applications"]
    (model,) = app["args"]["models"]
    return config, app, model


def engine(config: JSON) -> JSON:
    """Return the part of a config that says how the Engine is deployed."""
    deployments: list[JSON] = config["applications"][0]["deployments"]
    return next(one for one in deployments if one["name"] == "Engine:demo")


COUNTED = {"tokens_per_minute": 100_000}
"""The quota of the tenant `counted`: a request of `test_quotas.py` reserves some 1,900, less than a fiftieth
of it, and uses some 1,300."""

MEASURED = ("default", "leavers", "handles")
"""Tenants whose quotas are compared with the ledger."""

WIDE = {"tokens_per_day": 10**9, "requests_per_minute": 10**6, "max_concurrency": 10**4}
"""A quota that nothing reaches."""


def start_shared(folder: Path) -> Service:
    """Start the demo model and a model that is a function, one replica of each."""
    config, app, model = local()
    # The order of the tiers doesn't depend on the speed of the machine.
    model["batcher"]["priority_aging_s"] = None
    app["args"]["models"].append(MINILM)
    # The demo model and the ingress have reserved what two cores have.
    app["deployments"].append({"name": "Engine:minilm", "ray_actor_options": {"num_cpus": 0}})
    # Only requests that ask for it leave spans.
    app["args"]["telemetry"] = {"traces": {"endpoint": f"file://{folder}/spans", "sample_ratio": 0.0}}
    # OpenTelemetry's own period is 5 s.
    app["runtime_env"]["env_vars"]["OTEL_BSP_SCHEDULE_DELAY"] = "500"
    # A slow client is sent away in seconds; longer than httpx keeps an idle connection (5 s).
    config["controller_options"]["runtime_env"]["env_vars"]["SATURATE_HAPROXY_REQUEST_TIMEOUT_S"] = "8"
    # Their limits bind only the tests that use them up.
    app["args"]["usage"] = {"quotas": {"folder": f"{folder}/quotas", "tenants": {"counted": COUNTED}}}
    # Ray's own period, 10 s, is long for a test that waits for metrics.
    return Service(config, folder, metrics_ms=1000)


def start_pair(folder: Path) -> Service:
    """Start two replicas of the Ingress and two of the demo model, for tests that do them harm."""
    config, app, model = local()
    model["engine_hang_timeout_s"] = 5.0
    model["batcher"] |= {"max_queue_size": QUEUE, "goals": {"ttft_p99_s": 1.0}}
    use_exact_arithmetic(config)
    quotas = {"folder": f"{folder}/quotas", "tenants": dict.fromkeys(MEASURED, WIDE)}
    app["args"]["usage"] = {"ledger": {"folder": f"{folder}/usage"}, "quotas": quotas}
    for deployment in app["deployments"]:
        # Two engines fit on any machine where Ray doesn't count cores.
        deployment |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}
    service = Service(config, folder)
    try:
        wait_for_replicas(service, 2)
    except BaseException:
        service.stop()
        raise
    return service


class Starting:
    """A service that starts beside the tests; on one core it starts when a test asks for it.

    Args:
        start: Starts the service in a folder.
        folder: The folder.
        beside: Whether it starts at once, in a thread of its own.
    """

    def __init__(
        self,
        start: Callable[[Path], Service],
        folder: Path,
        *,
        beside: bool = len(os.sched_getaffinity(0)) > 1,
    ) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._start = functools.cache(lambda: self._pool.submit(start, folder))
        if beside:
            self._start()

    def service(self) -> Service:
        """Return the service once it is ready.

        Raises:
            StartError: It failed, and failed again.
        """
        return self._start().result()

    def wait(self) -> None:
        """Wait until the start has ended, well or not."""
        self._start().exception()

    def stop(self) -> Service | None:
        """Stop the service and return it; None: it was never asked for, or could not start."""
        if not self._start.cache_info().currsize or self._start().exception():
            return None
        service = self._start().result()
        service.stop()
        return service


def use_exact_arithmetic(config: JSON) -> None:
    """Have the demo model compute in 32 bits: its greedy text is then the same in batches of any size."""
    config["applications"][0]["args"]["models"][0]["engine"]["dtype"] = "float32"


class Restartable:
    """A service that can be killed and started again in its place.

    Attributes:
        service: The one that runs.
        url: Where it listens.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.service = Service(self._config(), folder)
        self.url = self.service.url

    def kill_all(self) -> None:
        """End every process of it at once, and start it anew on the same port."""
        while self.service.kill():
            pass
        self.service.process.wait(LIMIT_S)
        self.service = Service(self._config(), self._folder, int(self.url.rpartition(":")[2]))

    def kill(self, word: str) -> None:
        """Kill what has a word in its command line, once it runs: it may come back from the last kill."""
        wait_until(lambda: self.service.kill(word) > 0, news=self.service.news())

    @staticmethod
    def _config() -> JSON:
        config, _, _ = local()
        use_exact_arithmetic(config)
        return config


def wait_for_replicas(service: Service, count: int) -> None:
    """Wait until the service counts so many replicas of the demo model."""

    def counted() -> bool:
        # A connection was refused once while the second replicas came.
        try:
            health = httpx.get(f"{service.url}/health", timeout=30).json()
        except httpx.TransportError:
            return False
        # While no Ingress is there, HAProxy answers.
        return "models" in health and health["models"]["demo"]["replicas"] == count

    wait_until(counted, news=service.news())


def redeploy(service: Service, count: int, **changes: Any) -> None:
    """Deploy the config that a service was started with, changed; return once all of it runs.

    Args:
        service: The service.
        count: Replicas of its Engine.
        changes: Options of the Engine's deployment; `user_config` sets `max_running`.
    """
    config = copy.deepcopy(service.config)
    engine(config).update(changes, num_replicas=count)
    service.deploy(config)
    limit = changes["user_config"]["batcher"]["max_running"]
    wait_until(
        lambda: running_limits(service) == [limit] * count and is_settled(service), news=service.news()
    )


def running_limits(service: Service) -> list[int]:
    """Return the `max_running` of each Engine replica."""
    replicas = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["models"]["demo"]["replicas"]
    return [one["batcher"]["max_running"] for one in replicas]


def is_settled(service: Service, name: str = "llm") -> bool:
    """Return whether Ray Serve has nothing left to change in an application."""
    status = service.status(name)
    states = {one["status"] for one in status["deployments"].values()}
    return status["status"] == "RUNNING" and states == {"HEALTHY"}


def is_healthy(url: str) -> bool:
    """Return whether an Ingress says that it is healthy; one that starts may not answer."""
    try:
        return httpx.get(f"{url}/health", timeout=30).is_success
    except httpx.TransportError:
        return False
