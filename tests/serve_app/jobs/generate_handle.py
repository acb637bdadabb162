"""A fake deployment handle; the test decides how its calls of `/generate` end."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from pydantic_core import to_json
from ray import serve
from ray.serve.handle import DeploymentResponseGenerator

from serve_app.api.errors import RequestError
from serve_app.wire.request import RelayRequest
from tests.serve_app.answers import complete, refused
from tests.serve_app.ingress.engine_doubles import PLAIN


class Response(DeploymentResponseGenerator[bytes]):
    """A handle's response to a call.

    Attributes:
        future: The answer.
        left: Whether the caller has cancelled the call.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.left = False
        self._ended = False

    def __aiter__(self) -> "Response":
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            answer = complete(PLAIN, to_json(await self.future))
        except RequestError as error:
            answer = refused(error)
        self._ended = True
        return answer

    def cancel(self) -> None:
        self.left = True


class Handle:
    """The handle.

    Attributes:
        requests: Its calls.
        bodies: Their bodies.
        responses: Responses to its calls.
        asked: The same, for a test that waits for each.
    """

    def __init__(self) -> None:
        self.deployment_name = "Engine:demo"
        self.requests: list[RelayRequest] = []
        self.bodies: list[Any] = []
        self.responses: list[Response] = []
        self.asked: asyncio.Queue[Response] = asyncio.Queue()

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, request: RelayRequest) -> Response:
        self.requests.append(request)
        self.bodies.append(json.loads(request.body))
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
