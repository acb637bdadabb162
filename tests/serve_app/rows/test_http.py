"""A service over HTTP: its answers, and errors in every form."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic_core import to_json

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.rows.errors import RunError
from serve_app.rows.http import HTTPClient
from serve_app.rows.rows import RowAnswer, RowRequest
from tests.progress import STILL_S
from tests.serve_app.dataset.fake import FakeService, failure, listening

LIMIT_S = STILL_S
BODY = {"prompts": ["a"]}


def http_client(answer: Callable[[httpx.Request], httpx.Response], **options: Any) -> HTTPClient:
    return HTTPClient("http://fake/", transport=httpx.MockTransport(answer), **options)


async def send(client: HTTPClient, body: JSON = BODY) -> RowAnswer:
    """Send a row."""
    return await client.send(RowRequest("/generate", to_json(body), Scheduling()))


async def test_a_call_has_the_key() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={"results": ["A"]})

    async with http_client(answer, api_key="sk-ada") as client:
        assert await send(client) == RowAnswer(200, {"results": ["A"]})
    (first,) = requests
    assert str(first.url) == "http://fake/generate"
    assert json.loads(first.content) == BODY
    assert first.headers["authorization"] == "Bearer sk-ada"


async def test_an_error_of_the_service_keeps_its_fields() -> None:
    error = {"type": "rate_limit_error", "message": "full", "param": "prompts", "code": 429}
    client = http_client(lambda _: httpx.Response(429, json={"error": error}, headers={"retry-after": "7"}))
    assert await send(client) == RowAnswer(429, {"error": error}, 7.0)


@pytest.mark.parametrize(
    ("response", "status", "message"),
    [
        (httpx.Response(403, text="no"), 403, "403 Forbidden: no"),
        # Ray Serve's proxy, while the application isn't deployed.
        (httpx.Response(404, text="Path '/generate' not found."), 503, "404 Not Found"),
        (httpx.Response(200, text="no json"), 502, "no JSON object"),
        (httpx.Response(200, json=["x"]), 502, "no JSON object"),
        (httpx.Response(200, json={"error": "login"}), 502, "an error of another form: 'login'"),
        (httpx.Response(200, json={"error": {"code": "x"}}), 502, "an error of another form"),
    ],
)
async def test_an_answer_in_another_form_is_an_error_with_its_text(
    response: httpx.Response, status: int, message: str
) -> None:
    answer = await send(http_client(lambda _: response))
    assert answer.status == status
    assert message in answer.message


async def test_a_broken_connection_can_be_retried() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("")

    answer = await send(http_client(broken))
    assert (answer.status, answer.message) == (503, "http://fake: RemoteProtocolError")


BOTH = {
    "models": {
        "a": {"replicas": [{"replica": "first"}]},
        "b": {"replicas": [{"replica": "second", "adapters": [{"id": "b:adapter"}]}]},
    }
}


@pytest.mark.parametrize(
    ("stats", "model", "replica"),
    [
        (BOTH, None, "first"),
        (BOTH, "b", "second"),
        (BOTH, "b:adapter", "second"),
        ({"models": {"a": {"replicas": [], "error": "no answer"}}}, "a", None),
        (BOTH, "other", None),
        ([], "a", None),
    ],
)
async def test_statistics_are_those_of_the_model_or_none(
    stats: JSON, model: str | None, replica: str | None
) -> None:
    options = {} if model is None else {"model": model}
    found = await http_client(lambda _: httpx.Response(200, json=stats), **options).replicas()
    assert (found[0].replica if found else None) == replica


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    assert HTTPClient("localhost:8000").url == "http://localhost:8000"
    with pytest.raises(RunError, match="--url ftp://localhost: must begin with http"):
        HTTPClient("ftp://localhost")


SILENCE_S = 3.0


@pytest.mark.parametrize("status", [200, 503])
async def test_a_call_may_wait_longer_than_the_read_timeout(status: int) -> None:
    service = FakeService()
    service.keep_alive_s = SILENCE_S / 60
    service.release.clear()
    service.trouble = lambda body: None if status == 200 else failure(status)
    with listening(service) as url:
        async with HTTPClient(url, timeout=httpx.Timeout(SILENCE_S)) as client:
            call = asyncio.ensure_future(send(client, BODY | {"task_id": None}))
            async with asyncio.timeout(20 * SILENCE_S):
                while service.spaces < 80 and not call.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not call.done(), "the service is not silent"
            service.release.set()
            answer = await call
            assert answer.status == status
            if status == 200:
                assert answer.body["results"] == ["A"]
    assert len(service.calls) == 1


@pytest.mark.parametrize("final", [True, False])
async def test_an_error_after_the_answer_has_begun_says_whether_another_try_helps(final: bool) -> None:
    error = RequestError(500, "internal_error", "two engines failed", final=final)
    answer = httpx.Response(200, content=b"   " + json.dumps(error.body()).encode())
    found = await send(http_client(lambda _: answer))
    assert (found.status, found.final, found.message) == (500, final, "two engines failed")


MANY = 400
COSTLIER = 4
"""Times by which the CPU of a call may grow with the number of calls: the pool of httpx has 15."""


async def test_many_calls_at_once_cost_no_more_each_than_few() -> None:
    with listening(FakeService()) as url:
        async with HTTPClient(url) as client:

            async def cpu(at_once: int) -> float:
                began = time.process_time()
                for _ in range(MANY // at_once):
                    answers = await asyncio.gather(
                        *(send(client, BODY | {"task_id": None}) for _ in range(at_once))
                    )
                    assert {answer.status for answer in answers} == {200}, answers[-1].message
                return time.process_time() - began

            # The second time, all have idle connections to look through.
            await cpu(MANY)
            assert await cpu(MANY) < COSTLIER * await cpu(10)


async def test_an_answer_that_breaks_off_can_be_retried() -> None:
    assert (await send(http_client(lambda _: httpx.Response(200, content=b"   ")))).status == 502
