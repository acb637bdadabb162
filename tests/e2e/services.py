"""The services that tests share, each a variation of configs/local.yaml."""

import copy
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


def local() -> tuple[JSON, JSON, JSON]:
    """Return configs/local.yaml, its application and its model."""
    config: JSON = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    (app,) = config["applications"]
    (model,) = app["args"]["models"]
    config["controller_options"] = {"runtime_env": {"env_vars": {}}}
    app["runtime_env"] = {"env_vars": {}}
    return config, app, model


def engine(config: JSON) -> JSON:
    """Return the part of a config that says how the Engine is deployed."""
    deployments: list[JSON] = config["applications"][0]["deployments"]
    return next(one for one in deployments if one["name"] == "Engine:demo")


def engines(config: JSON) -> int:
    """Return the replicas of the demo model that a config asks for."""
    return int(engine(config).get("num_replicas", 1))


COUNTED = {"tokens_per_minute": 100_000}
"""The quota of the tenant `counted`: a request of `test_quotas.py` reserves some 1,900, less than a fiftieth
of it, and uses some 1,300."""

FAULTS = ("default", "leavers", "handles")
"""Tenants whose quotas are compared with the ledger while processes die under load."""

KINDS = ("chats", "lists", "answers", "beams", "vectors", "whole", "left", "resumed", "rows")
"""Tenants with one kind of request each, whose sums are compared to the token."""

MEASURED = (*FAULTS, *KINDS)

WIDE = {"tokens_per_day": 10**9, "requests_per_minute": 10**6, "max_concurrency": 10**4}
"""A quota that nothing reaches."""


def start(folder: Path) -> Service:
    """Start the service that tests share: one replica of the demo model and of a model that is a function."""
    config, app, model = local()
    # The order of the tiers doesn't depend on the speed of the machine.
    model["batcher"]["priority_aging_s"] = None
    model["engine_hang_timeout_s"] = 15.0
    use_exact_arithmetic(config)
    # A token of 32 bits takes twice the memory.
    model["engine"]["kv_cache_memory_bytes"] *= 2
    app["args"]["models"].append(MINILM)
    # All of it fits on any machine where Ray doesn't count cores.
    for deployment in app["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0}
    app["deployments"].append({"name": "Engine:minilm", "ray_actor_options": {"num_cpus": 0}})
    # Only requests that ask for it leave spans.
    app["args"]["telemetry"] = {"traces": {"endpoint": f"file://{folder}/spans", "sample_ratio": 0.0}}
    # OpenTelemetry's own period is 5 s.
    app["runtime_env"]["env_vars"]["OTEL_BSP_SCHEDULE_DELAY"] = "500"
    # A slow client is sent away in seconds; longer than httpx keeps an idle connection (5 s).
    config["controller_options"]["runtime_env"]["env_vars"]["SATURATE_HAPROXY_REQUEST_TIMEOUT_S"] = "8"
    # Their limits bind only the tests that use them up.
    quotas = {"folder": f"{folder}/quotas", "tenants": {"counted": COUNTED}}
    app["args"]["usage"] = {"ledger": {"folder": f"{folder}/usage"}, "quotas": quotas}
    # Ray's own period, 10 s, is long for a test that waits for metrics.
    return Service(config, folder, metrics_ms=1000)


def double(service: Service) -> None:
    """Give a service two replicas of the Ingress and of the demo model, and quotas; return once it runs."""
    (app,) = service.config["applications"]
    for deployment in app["deployments"]:
        if deployment["name"] in ("Ingress", "Engine:demo"):
            deployment["num_replicas"] = 2
    app["args"]["usage"]["quotas"]["tenants"] |= dict.fromkeys(MEASURED, WIDE)
    service.deploy(service.config)
    wait_for_replicas(service, 2)
    wait_until(lambda: is_settled(service), news=service.news())


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
        except (httpx.TransportError, ValueError):
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
