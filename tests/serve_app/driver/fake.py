"""A service that answers `/generate` as it is told to: it echoes, and fails on demand."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.e2e.service import free_port

JSON = dict[str, Any]
Trouble = Callable[[JSON], Response | None]
"""Looks at a call's body and returns a failure, or None to have it served."""


class FakeService:
    """What a driver talks to.

    Attributes:
        calls: The bodies of all calls that came in.
        tries: How often each was sent before, as it says.
        served: How often each prompt was answered.
        most_at_once: Calls that were under way at the same time, at most.
        trouble: Decides over failures.
        refuses: Prompts that can't be served, with the message of their error.
        replicas: What `/stats` says.
        gate: Calls wait for it before they are answered.
    """

    def __init__(self) -> None:
        self.calls: list[JSON] = []
        self.tries: list[int] = []
        self.served: Counter[str] = Counter()
        self.most_at_once = 0
        self.trouble: Trouble = lambda body: None
        self.refuses: dict[str, str] = {}
        self.replicas: list[JSON] = []
        self.gate = threading.Event()
        self.gate.set()
        self._at_once = 0
        self.app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/stats", self._stats),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(body)
        self.tries.append(int(request.headers.get("x-stainless-retry-count", 0)))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if not self.gate.is_set():
                await asyncio.to_thread(self.gate.wait, 60)
            return self.trouble(body) or JSONResponse(self._answer(body))
        finally:
            self._at_once -= 1

    def _answer(self, body: JSON) -> JSON:
        results: list[str | None] = []
        details: list[JSON | None] = []
        errors = []
        for index, prompt in enumerate(texts(body)):
            if message := self.refuses.get(prompt):
                errors.append({"index": index, "type": "invalid_request_error", "message": message})
                results.append(None)
                details.append(None)
                continue
            self.served[prompt] += 1
            results.append(prompt.upper())
            details.append(
                {"finish_reason": "stop", "prompt_tokens": len(prompt), "completion_tokens": len(prompt)}
            )
        return {"results": results, "details": details, "errors": errors, "task_id": body["task_id"]}

    async def _stats(self, request: Request) -> Response:
        return JSONResponse({"models": {"fake": {"replicas": self.replicas}}})


def texts(body: JSON) -> list[str]:
    """Return the prompts of a call, or the last message of each of its chats."""
    if "prompts" in body:
        return list(body["prompts"])
    return [messages[-1]["content"] for messages in body["messages"]]


def failure(
    status: int, type: str = "service_unavailable", param: str | None = None, retry_after: str | None = None
) -> Response:
    """Return an error as the real service words it."""
    error = {"message": f"failed with {status}", "type": type, "param": param, "code": status}
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return JSONResponse({"error": error}, status, headers)


def no_route() -> Response:
    """Return what Ray Serve's proxy says while the application isn't there."""
    return PlainTextResponse("Path '/generate' not found.", 404)


@contextlib.contextmanager
def running(app: Starlette) -> Iterator[int]:
    """Run an application on a port of the loopback interface, and give the port."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    for _ in range(1000):
        if server.started:
            break
        thread.join(0.01)
    else:
        raise RuntimeError("the application did not start")
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def listening(service: FakeService) -> Iterator[str]:
    """Run a service on a port of the loopback interface, and give its URL."""
    with running(service.app) as port:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            service.gate.set()
