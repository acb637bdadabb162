"""The routes of files and batches on a port of this machine, with an engine that a test plays."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from starlette.applications import Starlette

from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.routes import BatchAPI
from tests.fakes.service import running
from tests.progress import STILL_S
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import limits_of, opened

LIMIT_S = STILL_S


@contextmanager
def batch_site(folder: Path, status: Callable[[str], int] = lambda _: 200) -> Iterator[str]:
    """Yield the address of the routes."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        store, content = opened(folder)
        runner = BatchRunner(store, content, Engine(status), KeyRules({"demo"}, limits_of()), tick_s=0.05)
        app.mount("/", BatchAPI(store, content, runner.notice, limits=lambda key: limits_of()).app())
        running = asyncio.create_task(runner.run())
        yield
        runner.stop()
        async with asyncio.timeout(LIMIT_S):
            await running
        store.close()

    with running(Starlette(lifespan=lifespan)) as url:
        yield url
