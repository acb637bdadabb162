from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.service import Service
from tests.e2e.services import Restartable, double, start
from tests.progress import ANSWER_S


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of configs/local.yaml and a model that is a function, started once for all tests."""
    service = start(tmp_path_factory.mktemp("service"))
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


@pytest.fixture(scope="session")
def pair(service: Service) -> Service:
    """The shared service with two replicas of the Ingress and of the demo model, for tests that kill them."""
    double(service)
    return service


@pytest.fixture
def restartable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    """A service of its own for a test that kills all of it."""
    restartable = Restartable(tmp_path_factory.mktemp("restartable"))
    yield restartable
    restartable.service.stop()


@pytest.fixture(scope="session")
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=ANSWER_S) as client:
        yield client


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    ) as client:
        yield client
