"""Calls of `/generate` over the handle of an Engine."""

import asyncio

import pytest
from pydantic_core import to_json
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from serve_app.api.errors import EngineLostError, RequestError, engine_failed
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling
from serve_app.rows.errors import RunError
from serve_app.rows.handle import HandleClient
from serve_app.rows.rows import RowAnswer, RowRequest
from tests.progress import STILL_S
from tests.serve_app.jobs.generate_handle import Handle, put_in_place

BODY: JSON = {"prompts": ["a"]}


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """The handle of the Engine `demo` in the application `llm`, without a cluster."""
    return put_in_place(monkeypatch)


def send(body: JSON = BODY) -> "asyncio.Task[RowAnswer]":
    """Send a row."""
    client = HandleClient("llm", "demo")
    return asyncio.ensure_future(client.send(RowRequest("/generate", to_json(body), Scheduling())))


async def status_of(call: "asyncio.Task[RowAnswer]") -> int:
    """Return the status with which a call ends."""
    async with asyncio.timeout(STILL_S):
        try:
            return (await call).status
        except RequestError as error:
            return error.status


async def test_a_row_over_the_handle(handle: Handle) -> None:
    call = send()
    async with asyncio.timeout(STILL_S):
        (await handle.asked.get()).future.set_result({"results": ["A"]})
        assert await call == RowAnswer(200, {"results": ["A"]})
    assert handle.bodies == [BODY]


async def test_a_row_has_the_adapter_and_the_scheduling_of_its_body(handle: Handle) -> None:
    call = send(BODY | {"model": "demo:mine", "service_tier": "flex", "tenant": "anna"})
    async with asyncio.timeout(STILL_S):
        (await handle.asked.get()).future.set_result({"results": ["A"]})
        await call
    (request,) = handle.requests
    assert (request.source, request.adapter, request.path) == ("handle", "demo:mine", "/generate")
    assert request.scheduling == Scheduling(TIER_PRIORITY["flex"], "anna")
    assert request.facts.prompts == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError(400, "invalid_request_error", "prompts: no"), 400),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), 429),
        (ConnectionError("gone"), 503),
    ],
)
async def test_an_error_of_the_handle_has_a_status(handle: Handle, error: Exception, status: int) -> None:
    call = send()
    (await handle.asked.get()).future.set_exception(error)
    assert await status_of(call) == status


@pytest.mark.parametrize("error", [ActorDiedError(), EngineLostError()], ids=["replica", "vLLM's engine"])
async def test_a_row_that_three_engines_are_lost_with_is_final(handle: Handle, error: Exception) -> None:
    call = send()
    async with asyncio.timeout(STILL_S):
        for loss in range(3):
            (await handle.asked.get()).future.set_exception(error)
            if loss < 2:
                # The replica that dies answers until its process ends.
                (await handle.asked.get()).future.set_exception(engine_failed())
        with pytest.raises(RequestError, match="3 engines failed one after the other") as caught:
            await call
    assert caught.value.final
    assert handle.asked.empty()


async def test_a_row_whose_engine_is_lost_goes_to_another(handle: Handle) -> None:
    call = send()
    async with asyncio.timeout(STILL_S):
        (await handle.asked.get()).future.set_exception(ActorDiedError())
        (await handle.asked.get()).future.set_result({"results": ["A"]})
        assert (await call).body == {"results": ["A"]}


async def test_a_row_whose_engine_is_taken_away_goes_to_another(handle: Handle) -> None:
    call = send()
    (await handle.asked.get()).future.cancel()
    async with asyncio.timeout(STILL_S):
        (await handle.asked.get()).future.set_result({"results": ["A"]})
    assert await status_of(call) == 200


async def test_a_run_that_is_stopped_cancels_its_call(handle: Handle) -> None:
    call = send()
    await handle.asked.get()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(STILL_S):
            await call
    assert handle.responses[0].left


@pytest.mark.usefixtures("handle")
def test_an_unknown_engine_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(RunError, match="this cluster has: --app llm --model demo"):
        HandleClient("llm", "other")
