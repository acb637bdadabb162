"""A tiny service that answers with streams, on the loopback interface."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

REFUSAL = {"error": {"message": "no"}}

CARD = {"id": "m", "owned_by": "saturate", "kind": "llm", "parent": None, "max_model_len": 4096}


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
        model: The id of the model.
        renamed_after: Looks at the statistics after which the replicas are new ones; None: they stay.
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
    model: str = "m"
    renamed_after: int | None = None
    looks: int = 0
    bodies: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cut: int = 0
    most: int = 0
    running: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.note(request.path, body)
        if self.status != 200:
            return web.json_response(REFUSAL, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        # A client that leaves ends the events at once.
        async with aclosing(self.events(body)) as events:
            async for event in events:
                await response.write(event)
        return response

    def note(self, path: str, body: Any) -> None:
        """Note a request for an answer."""
        self.bodies.append(body)
        self.paths.append(path)

    async def events(self, body: Any) -> AsyncGenerator[bytes]:
        """Yield the events of an answer."""
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.silent:
                await asyncio.Event().wait()
            for number in range(body["max_tokens"]):
                await asyncio.sleep(self.token_s)
                event: Any = {"choices": [{"text": "a"}], "usage": {"completion_tokens": number + 1}}
                yield f"data: {json.dumps(event)}\n\n".encode()
                if self.broken:
                    yield b'data: {"error": {"message": "the engine died"}}\n\n'
                    return
            usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
            yield f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode()
        except (asyncio.CancelledError, GeneratorExit):
            self.cut += 1
            raise
        finally:
            self.running -= 1

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [CARD | {"id": self.model}]})

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response(self.report())

    def report(self) -> dict[str, Any]:
        """Return the statistics."""
        batcher = {
            "capacity": 100_000,
            "max_running": self.max_running,
            "running": self.running + self.others_running,
            "queue_depth": 0,
            "total_submitted": (len(self.bodies) if self.status == 200 else 0) + self.others,
        }
        self.looks += 1
        new = self.renamed_after is not None and self.looks > self.renamed_after
        replica = {"replica": "new" if new else "old", "batcher": batcher}
        return {"models": {self.model: {"replicas": [replica] * self.replicas}}}


@asynccontextmanager
async def streaming_server(**fields: Any) -> AsyncIterator[StreamingServer]:
    """Serve on a free port."""
    server = StreamingServer(**fields)
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/stats", server.stats)
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
