from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import openai
import pytest

from tests.e2e.service import Service
from tests.e2e.services import redeploy, start_pair


@pytest.fixture(scope="session")
def service(starting_service: "Future[Service]") -> Service:
    """The service of configs/local.yaml and a model that is a function, started once for all tests."""
    return starting_service.result()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two replicas of each deployment, for tests that kill them or overload them."""
    service = start_pair(tmp_path_factory.mktemp("pair"))
    yield service
    service.stop()
    assert service.processes() == [], "whatever was done to it, nothing is left behind"


@pytest.fixture(scope="module")
def small(pair: Service) -> Service:
    """The pair with one Engine of eight sequences at once."""
    redeploy(pair, 1, user_config={"batcher": {"max_running": 8}})
    return pair


@pytest.fixture(scope="session")
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
