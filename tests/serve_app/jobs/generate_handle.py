"""A fake deployment handle; the test decides how its calls end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve


class Response:
    """A handle's response to a call.

    Attributes:
        future: The answer.
        cancelled: Whether the caller has cancelled the call.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def __await__(self) -> Any:
        return self.future.__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """The handle.

    Attributes:
        bodies: Bodies of its calls.
        responses: Responses to its calls.
        asked: The same, for a test that waits for each.
    """

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.responses: list[Response] = []
        self.asked: asyncio.Queue[Response] = asyncio.Queue()
        self.generate = self

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, body: Any) -> Response:
        self.bodies.append(body)
        self.responses.append(Response())
        self.asked.put_nowait(self.responses[-1])
        return self.responses[-1]


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Return the handle of the Engine `demo` in the application `llm`; no cluster is asked for it."""
    handle = Handle()
    app = SimpleNamespace(deployments={"Engine:demo": None})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"llm": app}))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_, **__: handle)
    return handle
