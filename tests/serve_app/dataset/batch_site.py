"""The routes of files and batches on a port of this machine, with an engine that a test plays."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.routes import BatchAPI
from tests.progress import STILL_S
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import limits_of, opened

LIMIT_S = STILL_S


@contextmanager
def batch_site(folder: Path, status: Callable[[str], int] = lambda _: 200) -> Iterator[str]:
    """Yield the address of the routes."""
    server: uvicorn.Server

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        store, content = opened(folder)
        runner = BatchRunner(store, content, Engine(status), KeyRules({"demo"}, limits_of()), tick_s=0.05)
        app.mount("/", BatchAPI(store, content, runner.notice, limits=lambda key: limits_of()).app())
        running = asyncio.create_task(runner.run())
        ready.set()
        yield
        runner.stop()
        async with asyncio.timeout(LIMIT_S):
            await running
        store.close()

    ready = threading.Event()
    config = uvicorn.Config(Starlette(lifespan=lifespan), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S)
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
