"""Both clients: answers, and errors as they come from HTTP, a handle and Ray Serve."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.api.protocol import JSON
from serve_app.dataset.errors import DriverError
from serve_app.driver.clients import HandleClient, HTTPClient
from tests.progress import STILL_S
from tests.serve_app.driver.fake import FakeService, failure, listening
from tests.serve_app.jobs.generate_handle import Handle

LIMIT_S = STILL_S
BODY = {"prompts": ["a"]}


def http_client(answer: Callable[[httpx.Request], httpx.Response], **options: Any) -> HTTPClient:
    return HTTPClient("http://fake/", transport=httpx.MockTransport(answer), **options)


# HTTP


async def test_a_call_has_the_key_and_a_retry_its_count() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={"results": ["A"]})

    async with http_client(answer, api_key="sk-ada") as client:
        assert await client.generate(BODY) == {"results": ["A"]}
    (first,) = requests
    assert str(first.url) == "http://fake/generate"
    assert json.loads(first.content) == BODY
    assert first.headers["authorization"] == "Bearer sk-ada"


async def test_an_error_of_the_service_keeps_its_fields() -> None:
    error = {"type": "rate_limit_error", "message": "full", "param": "prompts", "code": 429}
    client = http_client(lambda _: httpx.Response(429, json={"error": error}, headers={"retry-after": "7"}))
    with pytest.raises(RequestError, match="full") as caught:
        await client.generate(BODY)
    found = caught.value
    assert (found.status, found.type, found.param, found.retry_after_s) == (429, error["type"], "prompts", 7)


@pytest.mark.parametrize(
    ("response", "status", "message"),
    [
        (httpx.Response(403, text="no"), 403, "403 Forbidden: no"),
        # Ray Serve's proxy, while the application isn't deployed.
        (httpx.Response(404, text="Path '/generate' not found."), 503, "404 Not Found"),
        (httpx.Response(200, text="no json"), 502, "not JSON"),
        (httpx.Response(200, json=["x"]), 502, "no JSON object"),
        (httpx.Response(200, json={"error": "login"}), 502, "an error of another form: 'login'"),
        (httpx.Response(200, json={"error": {"code": "x"}}), 502, "an error of another form"),
    ],
)
async def test_an_answer_in_another_form_is_an_error_with_its_text(
    response: httpx.Response, status: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await http_client(lambda _: response).generate(BODY)
    assert caught.value.status == status


async def test_a_broken_connection_can_be_retried() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("")

    with pytest.raises(RequestError, match="RemoteProtocolError") as caught:
        await http_client(broken).generate(BODY)
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("stats", "model", "replicas"),
    [
        ({"models": {"a": {"replicas": [1]}, "b": {"replicas": [2]}}}, None, [1]),
        ({"models": {"a": {"replicas": [1]}, "b": {"replicas": [2]}}}, "b", [2]),
        ({"models": {"a": {"replicas": [], "error": "no answer"}}}, "a", None),
        ({"models": {"a": {"replicas": [1]}}}, "other", None),
        ([], "a", None),
    ],
)
async def test_statistics_are_those_of_the_model_or_none(
    stats: JSON, model: str | None, replicas: list[Any] | None
) -> None:
    options = {} if model is None else {"model": model}
    assert await http_client(lambda _: httpx.Response(200, json=stats), **options).replicas() == replicas


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    assert HTTPClient("localhost:8000").url == "http://localhost:8000"
    with pytest.raises(DriverError, match="--url ftp://localhost: must begin with http"):
        HTTPClient("ftp://localhost")


SILENCE_S = 3.0


@pytest.mark.parametrize("status", [200, 503])
async def test_a_call_may_wait_longer_than_the_read_timeout(status: int) -> None:
    service = FakeService()
    service.keep_alive_s = SILENCE_S / 60
    service.release.clear()
    service.trouble = lambda body: None if status == 200 else failure(status)
    with listening(service) as url:
        async with HTTPClient(url, read_s=SILENCE_S) as client:
            call = asyncio.ensure_future(client.generate(BODY | {"task_id": None}))
            async with asyncio.timeout(20 * SILENCE_S):
                while service.spaces < 80 and not call.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not call.done(), "the service is not silent"
            service.release.set()
            if status == 200:
                assert (await call)["results"] == ["A"]
            else:
                with pytest.raises(RequestError, match="failed with 503") as caught:
                    await call
                assert caught.value.status == 503
    assert len(service.calls) == 1


@pytest.mark.parametrize("final", [True, False])
async def test_an_error_after_the_answer_has_begun_says_whether_another_try_helps(final: bool) -> None:
    error = RequestError(500, "internal_error", "two engines failed", final=final)
    answer = httpx.Response(200, content=b"   " + json.dumps(error.body()).encode())
    with pytest.raises(RequestError, match="two engines failed") as caught:
        await http_client(lambda _: answer).generate(BODY)
    assert (caught.value.status, caught.value.final) == (500, final)


async def test_an_answer_that_breaks_off_can_be_retried() -> None:
    with pytest.raises(RequestError, match="not JSON") as caught:
        await http_client(lambda _: httpx.Response(200, content=b"   ")).generate(BODY)
    assert caught.value.status == 502


# Handle


async def test_a_call_over_the_handle(handle: Handle) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate(BODY))
    await asyncio.sleep(0)
    handle.responses[0].future.set_result({"results": ["A"]})
    assert await asyncio.wait_for(call, LIMIT_S) == {"results": ["A"]}
    assert handle.bodies == [BODY]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError(400, "invalid_request_error", "prompts: no"), 400),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), 429),
        (ConnectionError("gone"), 503),
    ],
)
async def test_an_error_of_the_handle_has_a_status(handle: Handle, error: Exception, status: int) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate(BODY))
    await asyncio.sleep(0)
    handle.responses[0].future.set_exception(error)
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(call, LIMIT_S)
    assert caught.value.status == status


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def back_off(tried: int) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr("serve_app.ingress.relay.back_off", back_off)


@pytest.mark.parametrize("error", [ActorDiedError(), EngineLostError()], ids=["replica", "vLLM's engine"])
@pytest.mark.usefixtures("no_pause")
async def test_a_call_that_two_engines_are_lost_with_is_final(handle: Handle, error: Exception) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate(BODY))
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2):
            (await handle.asked.get()).future.set_exception(error)
        with pytest.raises(RequestError, match="2 engines failed one after the other") as caught:
            await call
    assert caught.value.final
    assert handle.asked.empty()


@pytest.mark.usefixtures("no_pause")
async def test_a_call_whose_engine_is_lost_goes_to_another(handle: Handle) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate(BODY))
    async with asyncio.timeout(LIMIT_S):
        (await handle.asked.get()).future.set_exception(ActorDiedError())
        (await handle.asked.get()).future.set_result({"results": ["A"]})
        assert await call == {"results": ["A"]}


async def test_a_call_without_an_answer_times_out_and_is_cancelled(handle: Handle) -> None:
    with pytest.raises(RequestError, match=r"no answer in 0\.01 s") as caught:
        await asyncio.wait_for(HandleClient("llm", "demo", read_s=0.01).generate(BODY), LIMIT_S)
    assert caught.value.status == 503
    assert handle.responses[0].cancelled


async def test_a_call_waits_on_while_the_replicas_work(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = HandleClient("llm", "demo", read_s=0.01)
    asked = 0

    async def replicas() -> list[JSON]:
        nonlocal asked
        asked += 1
        if asked == 3:
            handle.responses[0].future.set_result({"results": ["A"]})
        return [{"replica": "a"}]

    monkeypatch.setattr(client, "replicas", replicas)
    assert await asyncio.wait_for(client.generate(BODY), LIMIT_S) == {"results": ["A"]}
    assert asked == 3
    assert len(handle.responses) == 1


async def test_a_call_that_serve_cancels_can_be_retried(handle: Handle) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate(BODY))
    await asyncio.sleep(0)
    handle.responses[0].future.cancel()
    with pytest.raises(RequestError, match="was removed") as caught:
        await asyncio.wait_for(call, LIMIT_S)
    assert caught.value.status == 503


async def test_a_driver_that_is_stopped_cancels_its_call(handle: Handle) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate(BODY))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, LIMIT_S)
    assert handle.responses[0].cancelled


def test_an_unknown_engine_is_an_error_with_the_known_ones(handle: Handle) -> None:
    with pytest.raises(DriverError, match="this cluster has: --app llm --model demo"):
        HandleClient("llm", "other")
