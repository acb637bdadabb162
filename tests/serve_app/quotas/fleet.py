"""Replicas with their clients, and the service that keeps their quotas, on one event loop."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from serve_app.quotas.client import QuotaClient
from serve_app.quotas.holder import Holder
from serve_app.quotas.service import QuotaService
from serve_app.settings.usage import Quota, QuotasSettings
from serve_app.system.database import DatabaseError
from tests.progress import STILL_S

START = 1_790_000_040.0
"""The beginning of a minute, in the middle of a day."""

TENANT = "research"

LIMIT_S = STILL_S


class MemoryState:
    """A database that outlives its service.

    Attributes:
        texts: What was saved.
        failing: Every save fails.
    """

    place = "memory"

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.failing = False

    def load(self) -> dict[str, str]:
        return dict(self.texts)

    def save(self, changes: Mapping[str, str | None]) -> None:
        if self.failing:
            raise DatabaseError("the disk is full")
        for key, value in changes.items():
            if value is None:
                self.texts.pop(key, None)
            else:
                self.texts[key] = value

    def close(self) -> None:
        pass


async def inline(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function on the event loop, in place of a thread."""
    function(*arguments)


async def states_of(service: QuotaService) -> dict[str, tuple[Any, ...]]:
    """Return the states of all limits, by subject."""
    return {subject: states async for subject, states in service.states()}


class Engine:
    """The holder of an Engine with calls of one tenant.

    Args:
        name: Name of the holder.
        tenant: Name of the tenant.
        quota: Quota of the tenant.
    """

    def __init__(self, name: str, tenant: str, quota: Quota) -> None:
        self._at = 0.0
        self._holder = Holder(name, lambda: self._at)
        self._limits = self._holder.limits(f"tenant {tenant}", quota)

    def ask(self, need: int) -> Any:
        """Return the report of a call that waits for its tokens."""
        return self._holder.report([(self._limits, need)])

    def hold(self, answer: Any) -> Any:
        """Return the report of a call that has reserved all tokens of an answer."""
        self._holder.apply(answer, self._at)
        assert self._holder.take(self._limits, granted(answer))
        # A call that was a moment ago would ask ahead for the next call.
        self._at += 3.0
        return self._holder.report()


def granted(answer: Any) -> int:
    """Return the tokens that an answer grants."""
    return int(answer.grants[0].amount)


class Fleet:
    """Clients and a service, on the clock of the running loop.

    Attributes:
        answering: The service is there.
        cut_off: The names of clients whose reports are lost.
        calls: Reports that have reached it.
    """

    def __init__(self, quota: Quota, clients: int = 3, hop_s: float = 0.002, **settings: Any) -> None:
        self.settings = QuotasSettings(tenants={TENANT: quota}, folder="/nowhere", **settings)
        self.state = MemoryState()
        self.answering = True
        self.cut_off: set[str] = set()
        self.calls = 0
        self.jump_s = 0.0
        self._hop_s = hop_s
        self.loop = asyncio.get_running_loop()
        self.service = self._service()
        self.clients = [
            QuotaClient(self.settings, self.take, f"c{n}", clock=self.loop.time) for n in range(clients)
        ]
        for client in self.clients:
            client.start()

    def wall(self) -> float:
        return START + self.loop.time() + self.jump_s

    def restart(self) -> None:
        """Kill the service, and start another one with what was saved."""
        for task in self.service._tasks:
            task.cancel()
        self.service = self._service()

    async def used(self, limit: str = "tokens_per_minute") -> tuple[int, int]:
        """Return what a limit's window has used, and what calls have reserved."""
        states = {state.name: state for state in (await states_of(self.service))[f"tenant {TENANT}"]}
        state = states[limit]
        return state.limit - state.remaining - state.reserved, state.reserved

    async def settled(self) -> None:
        """Return when every client has reported."""
        await asyncio.sleep(5.0)

    def stop(self) -> None:
        for client in self.clients:
            if client._running is not None:
                client._running.cancel()
        for task in self.service._tasks:
            task.cancel()

    def _service(self) -> QuotaService:
        service = QuotaService(
            self.settings, self.state, wall=self.wall, monotonic=self.loop.time, beside=inline
        )
        service.start()
        return service

    async def take(self, report: Any) -> Any:
        await asyncio.sleep(self._hop_s)
        if not self.answering or report.holder in self.cut_off:
            raise ConnectionError("the service is away")
        self.calls += 1
        answer = await self.service.take(report)
        await asyncio.sleep(self._hop_s)
        return answer


class QuotasHandle:
    """The handle of a Quotas deployment.

    Args:
        settings: The settings of the quotas.
    """

    def __init__(self, settings: QuotasSettings) -> None:
        self.settings = settings
        self.service = QuotaService(
            settings, MemoryState(), wall=lambda: START, monotonic=lambda: 0.0, beside=inline
        )
        self.started = False
        self._reports = 0
        self._reported = asyncio.Condition()

    def options(self, *, method_name: str, **options: Any) -> Any:
        """Return the handle of a method."""
        return SimpleNamespace(remote=partial(self._call, method_name))

    async def _call(self, method: str, *arguments: Any) -> Any:
        if not self.started:
            self.started = True
            self.service.start()
        answer = await getattr(self.service, method)(*arguments)
        if method == "take":
            async with self._reported:
                self._reports += 1
                self._reported.notify_all()
        return answer

    async def left(self, subject: str, limit: str) -> int:
        """Return what remains of a limit once the replica has reported what it has now."""
        # A report that is under way may be from before.
        enough = self._reports + 2
        async with asyncio.timeout(LIMIT_S), self._reported:
            await self._reported.wait_for(lambda: self._reports >= enough)
        states = (await states_of(self.service))[subject]
        return int(next(state.remaining for state in states if state.name == limit))
