"""The parts of the batches in one process: state, content, runner, routes and metrics."""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.auth.key_store import KeyStore
from serve_app.engine.answer import Answer
from serve_app.jobs.batches import BatchClient, BatchRunner
from serve_app.jobs.content import Content, Contents, DiskContent
from serve_app.jobs.errors import StoreError
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.models import OPEN
from serve_app.jobs.routes import BatchAPI
from serve_app.jobs.storage import delete_noted
from serve_app.jobs.store import Store
from serve_app.jobs.upload import Uploads
from serve_app.rows.pacing import Auto
from serve_app.settings.batches import BatchesSettings
from serve_app.stats import BatchesStats, RowCounts
from serve_app.system.database import DatabaseError, FencedError
from serve_app.telemetry import catalogue
from serve_app.telemetry.faults import FaultCount
from serve_app.telemetry.meters import Meters
from serve_app.wire.frame import pack
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage

logger = logging.getLogger("ray.serve")

INTERVAL_S = 2.0
"""Seconds between two reports."""


class BatchesMetrics:
    """Records the statistics as metrics, periodically.

    Args:
        stats: Returns the statistics; see `BatchService.stats`.
        lost_calls: Calls that were lost with the process of their engine, by model.
        meters: Instruments of `catalogue.BATCHES`; None: Ray's instruments.
    """

    def __init__(
        self,
        stats: Callable[[], Awaitable[JSON]],
        lost_calls: Mapping[str, float],
        meters: Meters | None = None,
    ) -> None:
        self._stats = stats
        self._lost_calls = lost_calls
        self._meters = meters or Meters(catalogue.BATCHES)
        self._faults = FaultCount()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Stop reporting."""
        self._faults.stop()
        if self._task is not None:
            self._task.cancel()

    async def report(self) -> None:
        """Record the statistics once."""
        self._faults.report(self._meters)
        self._meters.count_all(catalogue.LOST_CALLS, self._lost_calls)
        stats = await self._stats()
        record, count = self._meters.record, self._meters.count
        for state, number in stats["batches"].items():
            record(catalogue.BATCHES_OPEN, number, state)
        for state in ("waiting", "in_flight"):
            record(catalogue.BATCHES_ROWS, stats["rows"][state], state)
        for outcome in ("completed", "failed"):
            count(catalogue.BATCHES_ROWS_ENDED, stats["rows"][outcome], outcome)
        record(catalogue.BATCHES_OLDEST, stats["oldest_s"])
        record(catalogue.BATCHES_LEFT, stats["eta_s"] or 0.0)
        record(catalogue.BATCHES_LATE, stats["late"])
        record(catalogue.BATCHES_BYTES, stats["bytes"])

    async def _run(self) -> None:
        while True:
            try:
                await self.report()
            except OSError as error:
                logger.warning("batches: no metrics: %r", error)
            except Exception:
                # A failure of telemetry must not stop the batches.
                logger.exception("batches: no metrics")
            await asyncio.sleep(INTERVAL_S)


DOWN_S = 60.0
"""Seconds to wait at a start for a database that is down."""

POLL_S = 0.2

BROKEN = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""SQLite's permanent errors: tables are missing, the file is damaged, or it isn't a database."""

GATHER_S = 0.02
"""Seconds for which results are gathered: a commit of one result takes nearly as long as a commit of ten."""

SCHEDULING = "scheduling"
"""Key of the ASGI scope under which a relayed request has its scheduling."""


class BatchService:
    """Files and batches, open and running.

    Args:
        settings: Place and limits.
        store: The state.
        content: The contents.
        client: The engines.
        models: Ids of the served models.
        keys: The API keys; None: the service has no keys.
    """

    def __init__(
        self,
        settings: BatchesSettings,
        store: Store,
        content: Contents,
        client: BatchClient,
        models: Collection[str],
        keys: KeyStore | None = None,
    ) -> None:
        rules = KeyRules(models, settings, keys)
        self.uploads = Uploads()
        self._store = store
        self._runner = BatchRunner(
            store,
            content,
            client,
            rules,
            concurrency=partial(Auto, most=settings.max_rows_in_flight),
            gather_s=GATHER_S,
        )
        api = BatchAPI(
            store,
            content,
            self._runner.notice,
            limits=rules.limits,
            rights=rules.rights,
            scheduling=_scheduling,
            warnings=lambda: self._runner.warnings,
        )
        self._app = api.app()
        self._running = asyncio.create_task(self._runner.run())
        self._running.add_done_callback(_tell_end)

    @classmethod
    async def open(
        cls,
        settings: BatchesSettings,
        client: BatchClient,
        models: Collection[str],
        keys: KeyStore | None = None,
        down_s: float = DOWN_S,
    ) -> "BatchService":
        """Open the state and the contents, and resume the open batches.

        Args:
            settings: Place and limits.
            client: The engines.
            models: Ids of the served models.
            keys: The API keys; None: the service has no keys.
            down_s: Seconds to wait for a database that is down.

        Raises:
            StoreError: The place of the state or of the contents can't be used as it is.
            OSError: The folder can't be created, read or written.
            UnusableError: The database can't be used as it is.
            DatabaseError: The database still fails after `down_s`, or fails for good.
        """
        place = _place(settings)
        store = await _open_store(lambda: Store(place), down_s)
        try:
            content = await asyncio.to_thread(_open_content, settings, store.epoch)
            await asyncio.to_thread(_delete_noted, store, content)
            if unfinished := await asyncio.to_thread(store.open_batches):
                logger.info("batches: resuming %d open batches", len(unfinished))
        except BaseException:
            store.close()
            raise
        return cls(settings, store, content, client, models, keys)

    async def relay(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        """Answer an HTTP request, as messages."""
        upload = await self.uploads.open(request.upload) if request.upload else None

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[SCHEDULING] = request.scheduling
            await self._app(scope, receive, send)

        answer = Answer(request, RequestUsage(), body=upload.receive if upload else None)
        try:
            async with aclosing(answer.pieces(answer.run(app))) as pieces:
                async for piece in pieces:
                    for message in pack(piece, request.path):
                        yield message
        finally:
            if upload is not None:
                await self.uploads.close(request.upload)

    async def stats(self) -> JSON:
        """Return the entry of the batches in `/stats`."""
        summary = await asyncio.to_thread(self._store.summary)
        runner = self._runner
        rows = runner.rows
        rate = rows.rate.per_s
        return BatchesStats(
            batches={state: summary.batches.get(state, 0) for state in OPEN},
            rows=RowCounts(
                waiting=max(0, summary.rows - rows.in_flight),
                in_flight=rows.in_flight,
                completed=rows.rate.total - rows.failed,
                failed=rows.failed,
            ),
            rows_in_flight_limit=rows.limit,
            rows_per_s=round(rate, 3) if summary.rows else 0.0,
            eta_s=round(summary.rows / rate, 1) if summary.rows and rate else None,
            oldest_s=0 if summary.oldest is None else max(0, int(time.time()) - summary.oldest),
            late=len(runner.warnings),
            files=summary.files,
            bytes=summary.bytes,
        ).body()

    def check(self) -> None:
        """Raise if the runner has failed."""
        if self._running.done():
            self._running.result()
            raise RuntimeError("the runner of the batches has ended")

    async def close(self, timeout_s: float) -> None:
        """Stop sending rows, record the rows that end in time, and close the state.

        Args:
            timeout_s: Seconds for rows in flight to end. The next process sends the remaining rows again.
        """
        self._runner.stop()
        await asyncio.wait([self._running], timeout=timeout_s)
        self._running.cancel()
        await asyncio.wait([self._running])
        await asyncio.to_thread(self._store.close)


def _tell_end(running: asyncio.Task[None]) -> None:
    """Log why the runner has failed, if it has; `check` makes Ray Serve replace the replica."""
    if not running.cancelled() and (error := running.exception()) is not None:
        # Several tasks may meet the same end at once.
        causes = dict.fromkeys(str(one) for one in _single(error) if isinstance(one, FencedError))
        logger.error("batches: the runner has ended: %s", "; ".join(causes) or error)


def _single(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group and of its subgroups; any other error is yielded itself."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for one in error.exceptions:
        yield from _single(one)


def _open_content(settings: BatchesSettings, epoch: int) -> Contents:
    folder = _folder(settings)
    if settings.content is None or "://" not in settings.content:
        folder = folder if settings.content is None else Path(settings.content).expanduser()
        return Content(folder, epoch, DiskContent(folder))
    # Imported only if used: fsspec is optional.
    from serve_app.jobs.object_storage import Objects

    return Content(folder, epoch, Objects(settings.content))


def _place(settings: BatchesSettings) -> Path | str:
    """Return the folder or the URL of the database of the state.

    Raises:
        StoreError: The variable with the database's URL isn't set.
    """
    url = settings.database
    if settings.database_env is not None and not (url := os.environ.get(settings.database_env)):
        raise StoreError(
            f"batches.database_env: the environment of the replica has no variable {settings.database_env}"
        )
    return _folder(settings) if url is None else url


async def _open_store(store: Callable[[], Store], down_s: float) -> Store:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + down_s
    told = ""
    while True:
        try:
            return await asyncio.to_thread(store)
        except DatabaseError as error:
            # The upper bits of SQLite's error codes distinguish variants of an error.
            if loop.time() > deadline or getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF in BROKEN:
                raise
            if (message := str(error)) != told:
                logger.warning("batches: %s; waiting", told := message)
        await asyncio.sleep(POLL_S)


def _delete_noted(store: Store, content: Contents) -> None:
    try:
        if deleted := delete_noted(store, content):
            logger.info("batches: deleted %d contents without a file", deleted)
    except OSError as error:
        logger.warning("batches: contents without a file can't be deleted before the next start: %s", error)


def _folder(settings: BatchesSettings) -> Path:
    return Path(settings.folder).expanduser()


def _scheduling(request: Request) -> Scheduling:
    scheduling: Scheduling = request.scope[SCHEDULING]
    return scheduling
