"""A tiny service on the loopback interface that answers with streams."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class StreamingServer:
    """Answers of one token after the other.

    Attributes:
        url: Its URL.
        status: The status of answers.
        silent: Answers never begin.
        broken: Answers end after their first token.
        token_s: Seconds between two tokens.
        others: Requests of others, in the statistics.
        others_running: Those of them that run.
        replicas: Replicas in the statistics.
        max_running: The same.
        bodies: The bodies that came.
        paths: Their paths.
        cut: Answers whose client has left before their end.
        most: The most answers at once.
    """

    url: str = ""
    status: int = 200
    silent: bool = False
    broken: bool = False
    token_s: float = 0.001
    others: int = 0
    others_running: int = 0
    replicas: int = 1
    max_running: int = 64
    bodies: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cut: int = 0
    most: int = 0
    running: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            if self.silent:
                await asyncio.Event().wait()
            for number in range(body["max_tokens"]):
                await asyncio.sleep(self.token_s)
                event: Any = {"choices": [{"text": "a"}], "usage": {"completion_tokens": number + 1}}
                await response.write(f"data: {json.dumps(event)}\n\n".encode())
                if self.broken:
                    await response.write(b'data: {"error": {"message": "the engine died"}}\n\n')
                    return response
            usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
            await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.cut += 1
            raise
        finally:
            self.running -= 1

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "owned_by": "saturate", "kind": "llm", "parent": None, "max_model_len": 4096}
        return web.json_response({"data": [card]})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": len((await request.json())["prompt"].split())})

    async def stats(self, request: web.Request) -> web.Response:
        batcher = {
            "capacity": 100_000,
            "max_running": self.max_running,
            "running": self.running + self.others_running,
            "queue_depth": 0,
            "total_submitted": (len(self.bodies) if self.status == 200 else 0) + self.others,
        }
        return web.json_response({"models": {"m": {"replicas": [{"batcher": batcher}] * self.replicas}}})


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, a minute at most."""
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


@asynccontextmanager
async def streaming_server(**fields: Any) -> AsyncIterator[StreamingServer]:
    """Serve on a free port."""
    server = StreamingServer(**fields)
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/stats", server.stats)
    app.router.add_get("/health", server.health)
    app.router.add_post("/tokenize", server.tokenize)
    # A client that leaves ends its answer at once.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
