"""The death of vLLM's worker, where it is a process of its own: not in configs/local.yaml.

SATURATE_FAULTS=5 ends five; without it, this is left out.
"""

import os
import signal
from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.service import ROOT, Service
from tests.e2e.strikes import LIMIT_S, strike

TIMES = int(os.environ.get("SATURATE_FAULTS", "0"))

pytestmark = [
    pytest.mark.last(3),
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(not TIMES, reason="the long form only: SATURATE_FAULTS=5"),
]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two Engines, each with a worker beside its EngineCore."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    (app,) = config["applications"]
    app["args"]["models"][0]["engine"]["distributed_executor_backend"] = "mp"
    for deployment in app["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0}
        if deployment["name"] != "Ingress":
            deployment["num_replicas"] = 2
    service = Service(config, tmp_path_factory.mktemp("workers"))
    yield service
    service.stop()
    assert service.processes() == []


@pytest.mark.parametrize("time", range(TIMES))
async def test_who_asks_meanwhile_gets_an_answer(time: int, workers: Service) -> None:
    found = await strike(workers, "VLLM::Worker", signal.SIGKILL)
    print(f"death of the worker: recovered in {found.recovered_s:.1f} s; {found.load.summary()}", flush=True)
    assert found.load.failures() == []
