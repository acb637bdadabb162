"""The routes for tests, with a runner behind them."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.types import Batch, FileObject

from serve_app.api.protocol import JSON
from serve_app.jobs import failpoints
from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.routes import BatchAPI
from tests.progress import STILL_S
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import CHAT, NOW, limits_of, opened, text_of

LIMITS = limits_of(max_file_bytes=1 << 20, max_open_batches=3, max_tenant_bytes=3 << 20)


def http_of(app: Any) -> httpx.AsyncClient:
    """Return an HTTP client of the routes."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://batches")


def client_of(app: Any, key: str) -> openai.AsyncOpenAI:
    """Return OpenAI's client with an API key, which is its tenant."""
    # Its type hints name another package; it takes clients of both.
    http: Any = http_of(app)
    return openai.AsyncOpenAI(base_url="http://batches/v1", api_key=key, http_client=http, max_retries=0)


class Site:
    """The routes and a runner behind them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limits = LIMITS
        self.store, self.content = opened(folder)
        self.engine = Engine(lambda id: 400 if id.startswith("bad") else 200)
        self.runner = BatchRunner(
            self.store,
            self.content,
            self.engine,
            KeyRules({"demo"}, LIMITS),
            clock=lambda: NOW,
            tick_s=0.05,
        )
        api = BatchAPI(
            self.store, self.content, self.runner.notice, limits=lambda key: self.limits, clock=lambda: NOW
        )
        self.app = api.app()
        self.committed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        failpoints.hook = self._reach

    def _reach(self, _: str) -> None:
        self._loop.call_soon_threadsafe(self.committed.set)

    def http(self) -> httpx.AsyncClient:
        """Return an HTTP client."""
        return http_of(self.app)

    def client(self, key: str) -> openai.AsyncOpenAI:
        """Return OpenAI's client with an API key, which is its tenant."""
        return client_of(self.app, key)

    async def ended(self, client: openai.AsyncOpenAI, id: str) -> Batch:
        """Poll a batch until it has ended."""
        async with asyncio.timeout(STILL_S):
            while True:
                self.committed.clear()
                batch = await client.batches.retrieve(id)
                if batch.status in ("completed", "failed", "expired", "cancelled"):
                    return batch
                await self.committed.wait()


async def upload(client: openai.AsyncOpenAI, *rows: JSON | bytes, **options: Any) -> FileObject:
    return await client.files.create(file=("in.jsonl", text_of(*rows)), purpose="batch", **options)


async def create(client: openai.AsyncOpenAI, file: FileObject, **options: Any) -> Batch:
    values: JSON = {"endpoint": CHAT, "completion_window": "24h"}
    return await client.batches.create(input_file_id=file.id, **(values | options))
