"""A fake service: its `/generate` returns prompts in capitals, and fails on demand."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.api.headers import KEEP_ALIVE
from serve_app.api.protocol import JSON
from tests.fakes.service import running

Trouble = Callable[[JSON], Response | None]
"""Looks at a call's body and returns a failure, or None to have it served."""


class FakeService:
    """The service.

    Attributes:
        calls: Bodies of all calls.
        served: Number of answers by prompt.
        most_at_once: Highest number of concurrent calls.
        trouble: Returns the failure of a call, or None.
        refuses: Prompts that can't be served, with the messages of their errors.
        replicas: Statistics of replicas in `/stats`.
        release: Calls wait for it before they are answered.
        held_from: Number of calls that don't wait for it.
        keep_alive_s: Seconds between two spaces, which a call that waits gets if it asks for them; None: the
            service sends none.
        spaces: Number of spaces that were sent.
    """

    def __init__(self) -> None:
        self.calls: list[JSON] = []
        self.served: Counter[str] = Counter()
        self.most_at_once = 0
        self.trouble: Trouble = lambda body: None
        self.refuses: dict[str, str] = {}
        self.replicas: list[JSON] = []
        self.release = threading.Event()
        self.release.set()
        self.held_from = 0
        self.keep_alive_s: float | None = None
        self.spaces = 0
        self._at_once = 0
        self.app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/stats", self._stats),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.calls)
        self.calls.append(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        held = not self.release.is_set() and number >= self.held_from
        try:
            if held and self.keep_alive_s and KEEP_ALIVE in request.headers:
                return StreamingResponse(self._alive(body, self.keep_alive_s), media_type="application/json")
            if held:
                await asyncio.to_thread(self.release.wait, 60)
            return self.trouble(body) or JSONResponse(self._answer(body))
        finally:
            self._at_once -= 1

    async def _alive(self, body: JSON, interval_s: float) -> AsyncIterator[bytes]:
        while not await asyncio.to_thread(self.release.wait, interval_s):
            self.spaces += 1
            yield b" "
        yield bytes((self.trouble(body) or JSONResponse(self._answer(body))).body)

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
    """Return an error in the service's form."""
    error = {"message": f"failed with {status}", "type": type, "param": param, "code": status}
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return JSONResponse({"error": error}, status, headers)


def no_route() -> Response:
    """Return the answer of Ray Serve's proxy while the application isn't deployed."""
    return PlainTextResponse("Path '/generate' not found.", 404)


@contextlib.contextmanager
def listening(service: FakeService) -> Iterator[str]:
    """Run a service on a port of the loopback interface; yield its URL."""
    with running(service.app) as url:
        try:
            yield url
        finally:
            service.release.set()
