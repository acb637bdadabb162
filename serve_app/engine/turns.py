"""Turns of an Engine that shares its devices: it takes them when its turn comes, and sleeps in between."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec.structs import replace

from batcher import ContinuousBatcher
from serve_app.api.errors import EngineAwayError, RequestError
from serve_app.api.protocol import JSON
from serve_app.settings.turns import ShareSettings
from serve_app.stats import Turn
from serve_app.system.rounds import Rounds
from serve_app.telemetry.catalogue import AWAKE, SWITCHING, TURNS_BEGUN
from serve_app.telemetry.meters import Meters
from serve_app.turns.board import Board
from serve_app.turns.rota import Entry, Order, State, follow

logger = logging.getLogger("ray.serve")

POLL_S = 0.02
"""Seconds between two looks at the batcher."""

BUSY_S = 0.1
"""Seconds between two looks at the other engines, by an engine that is awake or has work."""

IDLE_S = 1.0
"""The same of an engine that sleeps and has no work."""

SWITCH_S = 600.0
"""Seconds that vLLM may take to sleep or to wake up: with level 2 it loads the weights again, and the first
sleep with level 1 pins the memory of the host, some 0.7 GB per second."""

LOST_S = SWITCH_S + 60.0
"""Seconds without a look at the other engines after which the replica is replaced."""

FAILED_S = 60.0
"""Seconds for which the replica of an engine that failed to wake up tells why, before it is replaced."""

DRAINS = 8
"""Number of latest drains whose longest is the estimate of the next drain."""

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


class EngineTurns:
    """The turns of one Engine replica.

    Args:
        model: Its model.
        group: Its group.
        devices: Its devices.
        settings: The settings of the group.
        board: The entries of the engines on this machine.
        clock: Returns the time in seconds; the batcher's clock, and the other engines' too.

    Attributes:
        cause: Why it has failed; empty otherwise.
    """

    def __init__(
        self,
        model: str,
        group: str,
        devices: tuple[str, ...],
        settings: ShareSettings,
        board: Board,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._settings = settings
        self._board = board
        self._clock = clock
        self.cause = ""
        self._begun = 0  # turns
        self._still_s = 0.0  # seconds in which switches to this engine kept its devices from work
        now = clock()
        # The entry as it is now, and as it was written last.
        self._own = self._written = Entry(group, devices, "starting", now, since=now)
        self._stopped = self._failed = 0.0
        self._drains: deque[float] = deque([0.0], DRAINS)
        self._task: asyncio.Task[None] | None = None
        self._engine: Sleeper
        self._batcher: ContinuousBatcher
        self._rounds: Rounds

    @property
    def state(self) -> State:
        """Its state."""
        return self._own.state

    async def first(self) -> None:
        """Wait until the devices are free for the weights.

        Load them and call `rehearse`, then call `run`.

        Raises:
            OSError: The entries can't be read or written.
        """
        while self.state != "loading":
            if (order := self._look()) is not None:
                self._own = order.entry
            await asyncio.sleep(BUSY_S)

    async def rehearse(self, engine: Sleeper, batcher: ContinuousBatcher) -> None:
        """Let the engine fall asleep and wake up once, so that its first switch is as fast as later switches.

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
                for _ in range(math.ceil(SWITCH_S / POLL_S)):
                    if not batcher.load.running:
                        break
                    await asyncio.sleep(POLL_S)
                await engine.sleep()
                await engine.wake_up()
                batcher.resume()
        except Exception as error:
            cause = str(error) or type(error).__name__
            raise RuntimeError(f"{self._model} failed to fall asleep and wake up: {cause}") from error

    def run(self, engine: Sleeper, batcher: ContinuousBatcher) -> None:
        """Take turns from now on; the engine is awake.

        Args:
            engine: The engine.
            batcher: Its batcher, which is paused while the engine sleeps.
        """
        self._engine, self._batcher = engine, batcher
        self._rounds = Rounds("the look at the engines that share the device", LOST_S, self._clock)
        self._begin()
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Take no more turns. The devices are free when the engine's processes have ended."""
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
        message = f"The model {self._model!r} can't be used: {self.cause}"
        return EngineAwayError(message, FAILED_S)

    def check_health(self) -> None:
        """Raise if turns aren't taken any more, or the engine failed a while ago."""
        if self.state == "failed":
            if self._clock() - self._failed > FAILED_S:
                raise RuntimeError(self.cause)
            return
        self._rounds.check()
        if self._task is not None and self._task.done():
            self._task.result()

    def stats(self) -> JSON:
        """Return the entry of `/stats`."""
        return Turn(
            group=self._own.group,
            state=self.state,
            turns=self._begun,
            sleep_s=round(self._own.sleep_s, 3),
            wake_s=round(self._own.wake_s, 3),
            **({"cause": self.cause} if self.cause else {}),
        ).body()

    def report(self, meters: Meters) -> None:
        """Record the metrics of the turns."""
        labels = self._model, self._own.group
        meters.record(AWAKE, self.state in {"awake", "draining"}, *labels)
        meters.count(TURNS_BEGUN, self._begun, *labels)
        meters.count(SWITCHING, self._still_s, *labels)

    async def _run(self) -> None:
        while self._written.state != "failed":
            order = None
            with self._rounds.round():
                order = self._look()
            if order is None:
                await asyncio.sleep(POLL_S)
                continue
            await self._obey(order)
            await self._until_news()

    async def _obey(self, order: Order) -> None:
        before, self._own = self.state, order.entry
        match before, self.state:
            case "awake", "draining":
                self._stopped = self._clock()
                self._batcher.pause(order.wait_s)
            case "draining", "awake":
                self._batcher.resume()
            case "draining", "draining" if self._drained():
                await self._fall_asleep()
            case "asleep", "waking":
                await self._wake_up(order.still_from)
            case _, "draining" | "asleep":
                self._batcher.pause(order.wait_s)

    async def _fall_asleep(self) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(SWITCH_S):
                await self._engine.sleep()
        except Exception as error:
            # `_fail` logs the stack.
            await self._fail("fall asleep", error)
            return
        self._drains.append(began - self._stopped)
        now = self._clock()
        self._own = replace(
            self._own, state="asleep", freed=now, sleep_s=now - began, drain_s=max(self._drains)
        )

    async def _wake_up(self, still_from: float) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(SWITCH_S):
                await self._engine.wake_up()
        except Exception as error:
            # `_fail` logs the stack.
            await self._fail("wake up", error)
            return
        self._begin()
        self._own = replace(self._own, wake_s=self._own.began - began)
        self._still_s += self._own.began - still_from
        self._batcher.resume()

    def _begin(self) -> None:
        self._own = replace(self._own, state="awake", began=self._clock())
        self._begun += 1

    async def _fail(self, what: str, error: Exception) -> None:
        """Refuse all requests, and leave the devices to the other engines."""
        if self._engine.died:
            # The watchdog ends this process.
            return
        self.cause = f"it failed to {what}: {str(error) or type(error).__name__}"
        message = "%s: %s; its replica is replaced in %.0f s"
        logger.error(message, self._model, self.cause, FAILED_S, exc_info=error)
        self._failed = self._clock()
        self._engine.release()
        self._own = replace(self._own, state="failed", freed=self._clock())
        await self._batcher.stop(drain=False)

    async def _until_news(self) -> None:
        """Wait until there is something to tell, or the next look is due."""
        idle = self.state == "asleep" and not self._written.busy
        until = self._clock() + (IDLE_S if idle else BUSY_S)
        while self._clock() < until:
            if self.state != self._written.state or (self.state == "draining" and self._drained()):
                return
            if self._busy() != self._written.busy:
                return
            await asyncio.sleep(POLL_S)

    def _drained(self) -> bool:
        return not self._batcher.load.running and not self._engine.busy

    def _busy(self) -> bool:
        load = self._batcher.load
        return bool(load.running or load.waiting or self._engine.busy)

    def _look(self) -> Order | None:
        """Look at the other engines, and write the entry; None: another engine looks just now.

        Raises:
            OSError: The entries can't be read or written.
        """
        now = self._clock()
        own = replace(self._own, at=now) if self._task is None else self._at_work(now)

        def decide(name: str, others: Mapping[str, Entry]) -> Order:
            return follow(now, name, own, others, self._settings)

        if (order := self._board.look(decide)) is not None:
            self._written = order.entry
        return order

    def _at_work(self, now: float) -> Entry:
        """Return the entry with the work of now."""
        load = self._batcher.load
        waits = load.waiting and self.state != "awake"
        return replace(
            self._own,
            at=now,
            busy=self._busy(),
            tokens=load.cost,
            tier=load.priority,
            since=None if not waits else now if self._own.since is None else self._own.since,
            deadline=load.deadline,
            left_s=self._batcher.estimate_wait(0, LOWEST_TIER),
        )
