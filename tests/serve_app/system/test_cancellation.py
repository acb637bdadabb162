"""Whose end a cancellation is, and that a driver's call which Serve ended is made again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from serve_app.api.errors import RequestError
from serve_app.driver.clients import HandleClient
from serve_app.system import cancellation

LIMIT_S = 5.0


async def told_by(future: "asyncio.Future[None]") -> bool:
    """Wait for a future that is cancelled; return whether that is this task's own end."""
    try:
        await future
    except asyncio.CancelledError:
        return cancellation.is_own()
    raise AssertionError("nothing was cancelled")


async def test_what_a_task_waits_for_is_not_the_task() -> None:
    future = asyncio.get_running_loop().create_future()
    waits = asyncio.ensure_future(told_by(future))
    await asyncio.sleep(0)
    future.cancel()
    assert await asyncio.wait_for(waits, LIMIT_S) is False


async def test_a_task_that_is_cancelled_is_told_so() -> None:
    waits = asyncio.ensure_future(told_by(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    waits.cancel()
    assert await asyncio.wait_for(waits, LIMIT_S) is True


class Response:
    """What a handle returns for a call of which the test decides how it ends."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.left = False

    def __await__(self) -> Any:
        return self.future.__await__()

    def cancel(self) -> None:
        self.left = True


class Handle:
    """A deployment handle; `responses` are its calls."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.generate = self

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, body: Any) -> Response:
        self.responses.append(Response())
        return self.responses[-1]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    handle = Handle()
    app = SimpleNamespace(deployments={"Engine:demo": None})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"llm": app}))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_, **__: handle)
    return handle


async def test_a_call_that_serve_ends_is_worth_another_try(handle: Handle) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate({}))
    await asyncio.sleep(0)
    handle.responses[0].future.cancel()
    with pytest.raises(RequestError, match="taken away") as caught:
        await asyncio.wait_for(call, LIMIT_S)
    assert caught.value.status == 503


async def test_a_driver_that_is_stopped_leaves_its_call(handle: Handle) -> None:
    call = asyncio.ensure_future(HandleClient("llm", "demo").generate({}))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, LIMIT_S)
    assert handle.responses[0].left
