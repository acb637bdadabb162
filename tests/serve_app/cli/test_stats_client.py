"""The client of a service's statistics: each way to get none has its message."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_app.cli.stats_client import StatsClient, StatsError
from tests.ports import free_port
from tests.serve_app.cli.fake_service import FakeService


@pytest.fixture
def service() -> Iterator[FakeService]:
    service = FakeService(lambda path, headers: (200, {"models": {}}))
    yield service
    service.stop()


def reason(client: StatsClient) -> str:
    with client, pytest.raises(StatsError) as caught:
        client.poll()
    return caught.value.message


def test_a_poll_has_statistics_and_health_and_their_time(service: FakeService) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def answer(path: str, headers: dict[str, str]) -> tuple[int, Any]:
        asked.append((path, headers))
        return (
            (200, {"models": {}}) if path == "/stats" else (503, {"status": "starting", "models": {"m": {}}})
        )

    service.answer = answer
    with StatsClient(f"{service.url}/v1/", "secret", clock=lambda: 7.0) as client:
        poll = client.poll()
    assert client.url == service.url
    assert (poll.at, poll.stats, poll.health["status"]) == (7.0, {"models": {}}, "starting")
    assert [path for path, _ in asked] == ["/stats", "/health"]
    assert all(headers["authorization"] == "Bearer secret" for _, headers in asked)
    assert asked[0][1]["accept"] == "application/json"


def test_a_service_behind_a_prefix_is_asked_there(service: FakeService) -> None:
    service.answer = lambda path, headers: (200, {"models": {}}) if path == "/llm/stats" else (404, "")
    with StatsClient(f"{service.url}/llm") as client:
        assert client.poll().health == {}


def test_no_service() -> None:
    message = reason(StatsClient(f"http://127.0.0.1:{free_port()}"))
    assert "no service is there" in message
    assert "`saturate serve` starts one" in message


@pytest.mark.parametrize("url", ["ftp://host", ""])
def test_a_url_of_another_kind(url: str) -> None:
    with pytest.raises(StatsError, match="must begin with http:// or https://"):
        StatsClient(url)


def test_a_url_that_is_none() -> None:
    with pytest.raises(StatsError, match=r"http://\[::1: is no URL"):
        StatsClient("http://[::1")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "Not Found"),
        (302, ""),
        (200, "<html>hello</html>"),
        (200, [1, 2]),
        (200, {"object": "list"}),
        (200, {"models": ["demo"]}),
        (200, {"models": {"demo": {"replicas": None}}}),
    ],
)
def test_something_else_that_answers_is_told_from_a_service(
    service: FakeService, status: int, body: Any
) -> None:
    service.answer = lambda path, headers: (status, body)
    message = reason(StatsClient(service.url))
    assert "not as saturate does" in message
    assert "check the port" in message


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_names_the_option(service: FakeService, status: int) -> None:
    service.answer = lambda path, headers: (status, {"error": {"message": "This API key is disabled."}})
    message = reason(StatsClient(service.url, "wrong"))
    assert f"answers {status} (This API key is disabled.)" in message
    assert "--api-key-env NAME" in message
    assert "wrong" not in message


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (429, {"error": {"message": "too many requests"}}, "429 (too many requests)"),
        (503, "", "503 (Service Unavailable)"),
        (500, {"error": None}, "500 (Internal Server Error)"),
    ],
)
def test_a_failure_of_the_service_is_told(service: FakeService, status: int, body: Any, text: str) -> None:
    service.answer = lambda path, headers: (status, body)
    assert text in reason(StatsClient(service.url))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (httpx.ReadTimeout("slow"), "no answer within 10 s"),
        (httpx.RemoteProtocolError(""), "RemoteProtocolError"),
    ],
)
def test_a_connection_that_breaks_is_told(error: Exception, text: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    assert text in reason(StatsClient("http://service", transport=httpx.MockTransport(fail)))


@pytest.mark.parametrize("health", [(404, ""), (200, "[]"), (200, {"models": []}), (200, "no JSON")])
def test_a_picture_needs_no_health(service: FakeService, health: tuple[int, Any]) -> None:
    service.answer = lambda path, headers: (200, {"models": {}}) if path == "/stats" else health
    with StatsClient(service.url) as client:
        assert client.poll().health == {}
