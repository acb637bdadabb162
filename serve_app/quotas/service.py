"""The service that keeps the quotas: the counters, their clock and their database."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from serve_app.quotas.counters import SLICE, Counters, HolderAnswer, HolderReport, LimitState, slices
from serve_app.quotas.state import State
from serve_app.quotas.tenants import TenantQuotas
from serve_app.quotas.windows import WindowClock
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import QuotasSettings
from serve_app.system.cancellation import wait_for_event
from serve_app.system.database import DatabaseError, FencedError, UnusableError
from serve_app.system.rounds import Rounds

logger = logging.getLogger("ray.serve")

SAVE_S = 1.0
"""Seconds after which changes are saved if no answer waits for them."""

SWEEP_S = 10.0
"""Seconds between two checks for silent holders and for counters without use."""

REFRESH_S = 2.0
"""Seconds between two checks of the file of quotas."""

FILE = "quotas.db"

FOLDER = "quotas"
"""Folder of the state inside the folder of the batches."""

_HELD = "tenants"
"""Key of the last valid text of the file of quotas."""


class QuotaService:
    """The counters of all quotas, kept in a database.

    An answer with a grant, or to the last use of a block, leaves once this change is saved. Reports that
    arrive meanwhile are saved together. Other changes are saved a little later: holders report sums again.

    Args:
        settings: Quotas of tenants.
        state: The database, which nothing else uses.
        wall: Seconds since the epoch.
        monotonic: Seconds of a clock that never jumps.
        beside: Runs a function that blocks, with its arguments, beside the event loop.
        refresh_s: Seconds between two checks of the file of quotas.

    Raises:
        UnusableError: The content of the database is not a state of quotas.
        DatabaseError: The database fails.
        SettingsError: The file of quotas is invalid, and no earlier process has read it.
    """

    def __init__(
        self,
        settings: QuotasSettings,
        state: State,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        beside: Callable[..., Awaitable[None]] = asyncio.to_thread,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._state = state
        self._beside = beside
        self._refresh_s = refresh_s
        self._monotonic = monotonic
        stored = state.load()
        self._tenants = TenantQuotas(settings, stored.pop(_HELD, None))
        try:
            self._counters = Counters(stored, monotonic())
        except (ValueError, TypeError) as error:
            raise UnusableError(
                f"{state.place}: this is not the state of quotas ({error}). Restore it, or remove it: all "
                "windows then begin at zero."
            ) from error
        self._clock = WindowClock(wall, monotonic, self._counters.last_seen)
        self._pending: dict[str, str | None] = {}
        self._set_tenants()
        self._waiting: list[asyncio.Future[None]] = []
        self._unsaved = False
        self._saving = False
        self._closing = False
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._taken_over: FencedError | None = None

    def start(self) -> None:
        """Start saving, and checking the file of quotas, on the running loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(run()) for run in (self._save_on, self._refresh_on, self._sweep_on)]

    async def take(self, report: HolderReport) -> HolderAnswer:
        """Take a report and return the answer; see `Counters.take`.

        Raises:
            DatabaseError: The database fails: nothing was granted.
        """
        self.check()
        # The event loop does other things between the reports of many Engines.
        async with self._turn:
            answer = self._counters.take(report, self._clock.now(), self._monotonic())
            if len(report.counters) >= SLICE:
                await asyncio.sleep(0)
        await self._saved()
        return answer

    async def _saved(self) -> None:
        """Return once the urgent changes of this call, and of calls before it, are saved."""
        if self._counters.urgent:
            self._unsaved = True
        if self._unsaved or self._saving:
            saved = asyncio.get_running_loop().create_future()
            self._waiting.append(saved)
            self._wake.set()
            await saved

    async def states(self) -> AsyncIterator[tuple[str, tuple[LimitState, ...]]]:
        """Yield each subject with the states of its limits."""
        for part in slices(self._counters.subjects().items()):
            for subject, quota in part:
                yield subject, self._counters.states(subject, quota, self._clock.now())
            await asyncio.sleep(0)

    @property
    def holders(self) -> int:
        """The number of processes that report."""
        return self._counters.holders(self._monotonic())

    def check(self) -> None:
        """Raise an error if this service can't continue: another process has taken over, or a task has
        failed."""
        if self._taken_over is not None:
            raise self._taken_over
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Save the changes, and close the database."""
        # The saving task ends by itself. The thread of a cancelled task would run on, beside the last save
        # and after the database is closed.
        self._closing = True
        self._wake.set()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._taken_over is None:
            await self.save()
        self._state.close()

    async def save(self) -> None:
        """Save the changes, and release the answers that wait for them."""
        waiting, self._waiting = self._waiting, []
        changes, self._pending = self._pending, {}
        self._unsaved, self._saving = False, True
        failed: Exception | None = None
        try:
            for part in self._counters.take_changes():
                changes |= part
                await asyncio.sleep(0)
            if changes:
                await self._beside(self._state.save, changes)
        except Exception as error:
            failed = error
            # A grant stays in the counters, and is saved by the next try.
            self._pending = changes | self._pending
            self._unsaved = True
            if isinstance(error, FencedError):
                self._taken_over = error
            if isinstance(error, DatabaseError | FencedError):
                logger.warning("quotas: the state can't be saved: %s", error)
            else:
                logger.exception("quotas: the state can't be saved")
        finally:
            self._saving = False
        for future in waiting:
            if future.done():
                continue
            if failed is None:
                future.set_result(None)
            else:
                future.set_exception(failed)

    async def sweep(self) -> None:
        """Free the amounts of silent holders, and forget counters without blocks and current use."""
        for _ in self._counters.sweep(self._clock.now(), self._monotonic()):
            await asyncio.sleep(0)

    async def _save_on(self) -> None:
        while not self._closing:
            await wait_for_event(self._wake, SAVE_S)
            self._wake.clear()
            await self.save()

    async def _refresh_on(self) -> None:
        rounds = Rounds("the look at the quotas of tenants")
        while True:
            await asyncio.sleep(self._refresh_s)
            with rounds.round():
                if self._tenants.refresh():
                    self._set_tenants()

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    def _set_tenants(self) -> None:
        self._counters.set_tenants(self._tenants.quotas, self._tenants.version)
        if self._tenants.held is not None:
            self._pending[_HELD] = self._tenants.held


def place_of(quotas: QuotasSettings, batches: BatchesSettings | None) -> Path | str:
    """Return the file or the URL of the quotas' database: their own, or by default the place of the batches.

    Raises:
        SettingsError: The environment has no URL.
    """
    if quotas.folder is not None:
        return Path(quotas.folder).expanduser() / FILE
    url, name, field = quotas.database, quotas.database_env, "usage.quotas.database_env"
    if url is None and name is None:
        assert batches is not None
        url, name, field = batches.database, batches.database_env, "batches.database_env"
    if name is not None and not (url := os.environ.get(name)):
        raise SettingsError(f"{field}: the environment of the replica has no variable {name}")
    if url is not None:
        return url
    assert batches is not None
    return Path(batches.folder).expanduser() / FOLDER / FILE
