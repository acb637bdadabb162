"""The service that keeps the quotas: the book, its clock and its database."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from uuid import uuid4

from serve_app.quotas.book import QuotaBook
from serve_app.quotas.messages import Answer, LimitState, Report
from serve_app.quotas.state import State, StateError, TakenOverError
from serve_app.quotas.tenant_quotas import TenantQuotas
from serve_app.quotas.windows import WindowClock
from serve_app.settings.usage import QuotasSettings
from serve_app.system.rounds import Rounds
from serve_app.system.waiting import wait_for_event

logger = logging.getLogger("ray.serve")

SAVE_S = 1.0
"""Seconds after which changes are saved that no answer waits for."""

REFRESH_S = 2.0
"""Seconds between two looks at the file of quotas."""

_HELD = "tenants"
"""Key of the text of the file of quotas that holds."""


class QuotaService:
    """The book of all quotas, kept in a database.

    An answer that grants something leaves when the grant is saved. Reports that come meanwhile are saved
    together. What is only used or given back is saved a little later: holders report it again.

    Args:
        settings: Quotas of tenants.
        state: The database, which nothing else uses.
        wall: Seconds since the epoch.
        monotonic: Seconds of a clock that never jumps.
        beside: Runs a function that blocks, with its arguments, beside the event loop.
        refresh_s: Seconds between two looks at the file of quotas.

    Raises:
        StateError: The database fails, or keeps something else than quotas.
        SettingsError: The file of quotas is wrong, and no earlier process has read it.
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
            self._book = QuotaBook(stored, monotonic(), uuid4().hex)
        except (ValueError, TypeError) as error:
            raise StateError(
                f"{state.place}: this is not the state of quotas ({error}). Restore it, or remove it: "
                "all windows then begin anew."
            ) from error
        self._clock = WindowClock(wall, monotonic, self._book.last_seen)
        self._pending: dict[str, str | None] = {}
        self._set_tenants()
        self._waiting: list[asyncio.Future[None]] = []
        self._unsaved = False
        self._saving = False
        self._closing = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._taken_over: TakenOverError | None = None

    def start(self) -> None:
        """Begin to save, and to look at the file of quotas, on the running loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._save_on()), loop.create_task(self._refresh_on())]

    async def exchange(self, report: Report) -> Answer:
        """Take a report and return the answer; see `QuotaBook.exchange`.

        Raises:
            StateError: The database fails: nothing was granted.
        """
        self.check()
        answer = self._book.exchange(report, self._clock.now(), self._monotonic())
        if self._book.urgent:
            self._unsaved = True
        if self._unsaved or self._saving:
            # It may tell of a grant that isn't saved, of this report or of one before.
            saved = asyncio.get_running_loop().create_future()
            self._waiting.append(saved)
            self._wake.set()
            await saved
        return answer

    def states(self) -> Mapping[str, tuple[LimitState, ...]]:
        """Return the states of all limits, by subject."""
        return self._book.states(self._clock.now())

    @property
    def holders(self) -> int:
        """The number of replicas that hold leases or may do so."""
        return self._book.holders(self._monotonic())

    def check(self) -> None:
        """Raise if this service can't go on: another process has taken over, or its tasks have failed."""
        if self._taken_over is not None:
            raise self._taken_over
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Save what has changed, and close the database."""
        # The one that saves ends by itself: when a task is cancelled its thread goes on, beside the last save
        # and behind the end of the database.
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
        """Save what has changed, and let the answers leave that wait for it."""
        waiting, self._waiting = self._waiting, []
        changes = self._pending | self._book.take_changes()
        self._pending = {}
        self._unsaved, self._saving = False, True
        failed: Exception | None = None
        try:
            if changes:
                await self._beside(self._state.save, changes)
        except Exception as error:
            failed = error
            # A grant stays in the book, and is saved by the next try.
            self._pending = changes | self._pending
            self._unsaved = True
            if isinstance(error, TakenOverError):
                self._taken_over = error
            if isinstance(error, StateError):
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

    def _set_tenants(self) -> None:
        self._book.set_tenants(self._tenants.quotas, self._tenants.version)
        if self._tenants.held is not None:
            self._pending[_HELD] = self._tenants.held
