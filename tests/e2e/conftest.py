from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.service import Service
from tests.e2e.services import Restartable, Starting, redeploy, start_pair
from tests.progress import ANSWER_S


@pytest.fixture(scope="session")
def service(starting_service: Starting) -> Service:
    """The service of configs/local.yaml and a model that is a function, started once for all tests."""
    return starting_service.service()


@pytest.fixture(scope="session")
def starting_pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    starting_service: Starting | None,
) -> Iterator[Starting | None]:
    """The pair of replicas, which starts when a test asks for this; None if no test of the run needs it."""
    if not any("pair" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    if starting_service:
        # Two starts at once would take several times as long.
        starting_service.wait()
    starting = Starting(start_pair, tmp_path_factory.mktemp("pair"))
    yield starting
    if service := starting.stop():
        assert service.processes() == [], "processes are left behind"


@pytest.fixture(scope="session")
def pair(starting_pair: Starting) -> Service:
    """Two replicas of each deployment, for tests that kill them or overload them."""
    return starting_pair.service()


@pytest.fixture(scope="module")
def small(pair: Service) -> Service:
    """The pair with one Engine of eight sequences at once."""
    redeploy(pair, 1, user_config={"batcher": {"max_running": 8}})
    return pair


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
