import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import yaml

from tests.e2e.service import ROOT, Service

MINILM = {
    "id": "minilm",
    "kind": "function",
    "target": "serve_app.demo.minilm:MiniLM",
    "embeddings": True,
    "batcher": {"profile": "variable_length", "target_batch_cost": 4096, "max_batch_size": 64},
}


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of configs/local.yaml and a model that is a function, started once for all tests."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    (app,) = config["applications"]
    # However slow the machine, a class that waits stays where it is.
    app["args"]["models"][0]["batcher"]["priority_aging_s"] = None
    app["args"]["models"].append(MINILM)
    # The demo model and the ingress have reserved what two cores have.
    app["deployments"].append({"name": "Engine:minilm", "ray_actor_options": {"num_cpus": 0}})
    folder = tmp_path_factory.mktemp("service")
    # Only requests whose sender wants it leave spans.
    traces = {"endpoint": f"file://{folder}/spans", "sample_ratio": 0.0}
    app["args"]["telemetry"] = {"traces": traces}
    # Seconds count where a test waits for metrics.
    service = Service(config, folder, metrics_ms=1000)
    yield service
    service.stop()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of configs/local.yaml with two replicas of each deployment, for tests that run last."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    (app,) = config["applications"]
    # A step takes milliseconds; so long takes none, on any machine.
    app["args"]["models"][0]["engine_hang_timeout_s"] = 5.0
    for deployment in app["deployments"]:
        # Two engines fit on any machine, if Ray doesn't reckon.
        deployment |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}
    service = Service(config, tmp_path_factory.mktemp("pair"))
    try:
        deadline = time.monotonic() + 120
        while httpx.get(f"{service.url}/health").json()["models"]["demo"]["replicas"] < 2:
            assert time.monotonic() < deadline, service.output
            time.sleep(0.2)
        yield service
    finally:
        service.stop()
    assert service.processes() == [], "whatever was done to it, nothing is left behind"


@pytest.fixture(scope="session")
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
