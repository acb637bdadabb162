"""Turns of an Engine that shares its device: it asks for them, and sleeps in between."""

import asyncio
import fcntl
import hashlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from batcher import ContinuousBatcher
from serve_app.api.errors import EngineAwayError, RequestError
from serve_app.api.protocol import JSON
from serve_app.quotas.client import Handle
from serve_app.stats import Turn
from serve_app.system import cancellation
from serve_app.system.private_files import private_folder
from serve_app.system.rounds import Rounds
from serve_app.turns.messages import Order, State, TurnDemand, TurnReport

logger = logging.getLogger("ray.serve")

LOOK_S = 0.02
"""Seconds between two looks at the batcher, which tell nobody anything if nothing has changed."""

BUSY_S = 0.1
"""Seconds between two reports of an engine that is awake or has work."""

IDLE_S = 1.0
"""The same of one that sleeps and has none."""

ASK_S = 5.0
"""Seconds that an answer to a report may take."""

REPORT = "the report to the turns"
"""The work of a task that reports, for messages."""

SWITCH_S = 600.0
"""Seconds that vLLM may take to sleep or to wake up: with level 2 it loads the weights again, and the first
sleep with level 1 pins the memory of the host, some 0.7 GB per second."""

FAILED_S = 60.0
"""Seconds for which the replica of an engine that failed to wake up tells why, before it is replaced."""

LOWEST_TIER = 1
"""The tier behind all others."""


class Sleeper(Protocol):
    """An engine that can sleep."""

    @property
    def busy(self) -> bool:
        """True if it has work."""

    @property
    def died(self) -> bool:
        """True if it has died."""

    async def sleep(self) -> None:
        """Give the memory of the device free."""

    async def wake_up(self) -> None:
        """Take the memory of the device; raise if the model can't be used afterwards."""

    def release(self) -> None:
        """End the engine's processes, which frees the memory in any case."""


class Place(NamedTuple):
    """An engine among those that take turns; see `TurnReport`."""

    group: str
    device: str
    replica: str
    model: str


class DeviceLock:
    """The memory of a device, for one engine of this machine: the lock of a file.

    The kernel frees the lock when the process ends. Turns gives the device by reports, which an engine can't
    send while its constructor holds the event loop: a new replica of Turns may give the device away then.

    Args:
        device: Name of the device.
        folder: Folder of the files; it is made for this user alone.
    """

    def __init__(self, device: str, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir(), f"saturate-{os.geteuid()}-devices")
        private_folder(folder)
        # Ends with the process.
        self._file = (folder / hashlib.sha256(device.encode()).hexdigest()[:32]).open("w")

    def take(self) -> bool:
        """Take the device, or keep it; False: another engine has it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give(self) -> None:
        """Give the device back."""
        fcntl.flock(self._file, fcntl.LOCK_UN)


def asking(turns: Handle) -> Callable[[TurnReport], Awaitable[Order]]:
    """Return what sends a report to the deployment Turns, by its handle."""
    method = turns.options(method_name="exchange", _by_reference=False, request_serialization="pickle")

    async def exchange(report: TurnReport) -> Order:
        order: Order = await method.remote(report)
        return order

    return exchange


class EngineTurns:
    """The turns of one Engine replica.

    Args:
        place: Its group, its device and its names.
        exchange: Sends a report and returns the answer.
        lock: The memory of the device.
        clock: Returns the time in seconds; the batcher's clock.

    Attributes:
        state: What it does.
        cause: Why it has failed; empty otherwise.
    """

    def __init__(
        self,
        place: Place,
        exchange: Callable[[TurnReport], Awaitable[Order]],
        lock: DeviceLock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._exchange = exchange
        self._lock = lock
        self._clock = clock
        self.state: State = "starting"
        self.cause = ""
        self._told = TurnReport(*place, 0, "starting")
        self._answered = True
        self._began = 0
        self._sleep_s = self._wake_s = 0.0
        self._waiting_since: float | None = clock()
        self._failed_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._engine: Sleeper
        self._batcher: ContinuousBatcher

    async def first(self) -> None:
        """Wait until the device is free for the weights.

        Load them and call `rehearse`, then call `run`.
        """
        while True:
            order = await self._ask()
            if order is not None and order.yours and self._lock.take():
                break
            await asyncio.sleep(BUSY_S)
        self.state, self._waiting_since = "loading", None
        await self._ask()

    async def rehearse(self, engine: Sleeper, batcher: ContinuousBatcher) -> None:
        """Let the engine fall asleep and wake up once, so that its first switch is as fast as the others.

        vLLM pins the memory of the host for the weights at the first sleep, which takes tens of seconds, and
        keeps it. The engine has the device meanwhile, and no requests yet, but may be changing its adapters.

        Args:
            engine: The engine.
            batcher: Its batcher, which is paused while the engine sleeps.

        Raises:
            RuntimeError: It can't fall asleep, or wake up.
        """
        try:
            async with asyncio.timeout(SWITCH_S):
                batcher.pause()
                for _ in range(math.ceil(SWITCH_S / LOOK_S)):
                    if not batcher.load.running:
                        break
                    await asyncio.sleep(LOOK_S)
                await engine.sleep()
                await engine.wake_up()
                batcher.resume()
        except Exception as error:
            cause = str(error) or type(error).__name__
            raise RuntimeError(f"{self._place.model} failed to fall asleep and wake up: {cause}") from error

    def run(self, engine: Sleeper, batcher: ContinuousBatcher) -> None:
        """Take turns from now on; the engine is awake.

        Args:
            engine: The engine.
            batcher: Its batcher, which is paused while the engine sleeps.
        """
        self._engine, self._batcher = engine, batcher
        self.state = "awake"
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Take no more turns."""
        if self._task is not None:
            self._task.cancel()

    @property
    def asleep(self) -> bool:
        """True while another model has the device, or is about to get it."""
        return self.state in {"draining", "asleep"}

    @property
    def refusal(self) -> RequestError | None:
        """The answer to all requests if the engine has failed; None: it hasn't."""
        if self.state != "failed":
            return None
        message = f"The model {self._place.model!r} can't be used: {self.cause}"
        return EngineAwayError(message, FAILED_S)

    def check_health(self) -> None:
        """Raise if turns aren't taken any more, or the engine failed a while ago."""
        if self.state == "failed":
            if self._clock() - self._failed_at > FAILED_S:
                raise RuntimeError(self.cause)
        elif self._task is not None and self._task.done():
            self._task.result()

    def stats(self) -> JSON:
        """Return the entry of `/stats`."""
        return Turn(
            group=self._place.group,
            state=self.state,
            turns=self._began,
            sleep_s=round(self._sleep_s, 3),
            wake_s=round(self._wake_s, 3),
            **({"cause": self.cause} if self.cause else {}),
        ).body()

    async def _run(self) -> None:
        self._began += 1
        while True:
            order = await self._ask()
            if order is not None:
                if self.state == "failed":
                    return
                await self._obey(order)
            await self._until_news()

    async def _obey(self, order: Order) -> None:
        match self.state:
            case "awake" if not order.yours:
                self._batcher.pause(order.wait_s)
                self.state = "draining"
            case "draining" if order.yours:
                self._batcher.resume()
                self.state = "awake"
            case "draining" if self._drained():
                await self._fall_asleep()
            case "asleep" if order.yours and self._lock.take():
                await self._wake_up()
            case "draining" | "asleep":
                self._batcher.pause(order.wait_s)

    async def _fall_asleep(self) -> None:
        began = self._clock()
        try:
            await self._switch(self._engine.sleep())
        except Exception as error:
            # `_fail` logs the stack.
            await self._fail("fall asleep", error)
            return
        self.state, self._sleep_s = "asleep", self._clock() - began
        self._lock.give()

    async def _wake_up(self) -> None:
        self.state = "waking"
        await self._ask()
        began = self._clock()
        try:
            await self._switch(self._engine.wake_up())
        except Exception as error:
            # `_fail` logs the stack.
            await self._fail("wake up", error)
            return
        self.state, self._wake_s = "awake", self._clock() - began
        self._began += 1
        self._batcher.resume()

    async def _switch(self, switching: Awaitable[None]) -> None:
        """Wait for the engine to sleep or to wake up.

        Reports go on meanwhile: a new replica of Turns learns from them that the device is not free.
        """
        reporting = asyncio.create_task(self._report_on())
        try:
            async with asyncio.timeout(SWITCH_S):
                await switching
        finally:
            reporting.cancel()

    async def _report_on(self) -> None:
        rounds = Rounds(REPORT)
        while True:
            await asyncio.sleep(IDLE_S)
            with rounds.round():
                await self._ask()

    async def _fail(self, what: str, error: Exception) -> None:
        """Refuse all requests, and leave the device to the others."""
        if self._engine.died:
            # The watchdog ends this process.
            return
        self.state, self._failed_at = "failed", self._clock()
        self.cause = f"it failed to {what}: {str(error) or type(error).__name__}"
        message = "%s: %s; its replica is replaced in %.0f s"
        logger.error(message, self._place.model, self.cause, FAILED_S, exc_info=error)
        self._engine.release()
        self._lock.give()
        await self._batcher.stop(drain=False)

    async def _until_news(self) -> None:
        """Wait until there is something to tell, or the next report is due."""
        idle = self.state == "asleep" and not self._told.demand.busy
        until = self._clock() + (IDLE_S if idle or not self._answered else BUSY_S)
        while self._clock() < until:
            if self.state != self._told.state or (self.state == "draining" and self._drained()):
                return
            if self._demand().busy != self._told.demand.busy:
                return
            await asyncio.sleep(LOOK_S)

    def _drained(self) -> bool:
        return not self._batcher.load.running and not self._engine.busy

    def _demand(self) -> TurnDemand:
        now = self._clock()
        if self.state in {"starting", "loading"}:
            return TurnDemand(True, waited_s=now - (self._waiting_since or now))
        load = self._batcher.load
        if self.state == "awake" or not load.waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        return TurnDemand(
            bool(load.running or load.waiting or self._engine.busy),
            load.cost,
            load.priority,
            0.0 if self._waiting_since is None else now - self._waiting_since,
            None if load.deadline is None else load.deadline - now,
            self._batcher.estimate_wait(0, LOWEST_TIER),
        )

    async def _ask(self) -> Order | None:
        """Report, and return the answer; None: there was none."""
        self._told = TurnReport(
            *self._place, self._told.number + 1, self.state, self._demand(), self._sleep_s, self._wake_s
        )
        try:
            async with asyncio.timeout(ASK_S):
                order = await self._exchange(self._told)
        except (Exception, asyncio.CancelledError) as error:
            # Turns is away, or starts again; what it raises, Ray Serve has logged there with its stack.
            if cancellation.is_own():
                raise
            if self._answered:
                logger.warning("%s goes on as it is: turns aren't given: %r", self._place.model, error)
            self._answered = False
            return None
        self._answered = True
        return order
