"""The death of a worker of vLLM, where it is a process of its own: not in configs/local.yaml."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.fault_injection import inject, wait_until_whole
from tests.e2e.service import Service
from tests.e2e.services import local, use_exact_arithmetic

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two ranks"])
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two Engines, each with workers beside its EngineCore: one, or one for each half of the model."""
    config, app, model = local()
    use_exact_arithmetic(config)
    model["engine"]["distributed_executor_backend"] = "mp"
    model["engine"]["tensor_parallel_size"] = request.param
    for deployment in app["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0}
        if deployment["name"] != "Ingress":
            deployment["num_replicas"] = 2
    service = Service(config, tmp_path_factory.mktemp("workers"))
    yield service
    service.stop()
    assert service.processes() == []


async def test_clients_get_their_answers(workers: Service) -> None:
    await asyncio.to_thread(wait_until_whole, workers)
    found = await inject(workers, "VLLM::Worker", signal.SIGKILL)
    print(f"death of a worker: recovered in {found.recovered_s:.1f} s; {found.load.summary()}", flush=True)
    assert found.load.failures() == []
