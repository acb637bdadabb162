"""The Turns deployment: rotas by group and device, and engines whose processes have ended."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app.settings.schema import parse
from serve_app.turns.deployment import OPENING_S, SILENT_S, Turns
from serve_app.turns.messages import Order, State, TurnDemand, TurnReport
from tests.fakes.clock import Clock

MODEL = {"source": "s", "simulate": "h100-8b", "share": "g"}
SETTINGS = parse(
    {
        "models": [{"id": "a", **MODEL}, {"id": "b", **MODEL}],
        "share_groups": {"g": {"min_turn_s": 1.0, "max_wait_s": 7.0}},
        "telemetry": {"metrics": False},
    }
)


class Group:
    """A Turns deployment and the engines that it hears of."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.living: set[str] | Exception = {"a#1", "b#1"}
        self.turns = Turns(SETTINGS, self.clock, self._living)
        self._number = 0

    def _living(self) -> set[str]:
        if isinstance(self.living, Exception):
            raise self.living
        return self.living

    async def tell(self, replica: str, state: State, device: str = "n:0", waited_s: float = 0.0) -> Order:
        self._number += 1
        work = TurnDemand(True, 10, waited_s=waited_s)
        report = TurnReport("g", device, replica, replica[0], self._number, state, work)
        return await self.turns.exchange(report)


@asynccontextmanager
async def running() -> AsyncGenerator[Group, None]:
    group = Group()
    try:
        yield group
    finally:
        await group.turns.__del__()


async def test_each_device_has_its_own_rota_with_the_settings_of_its_group() -> None:
    async with running() as group:
        assert not (await group.tell("a#1", "starting")).yours
        group.clock.now = OPENING_S
        assert (await group.tell("a#1", "starting")).yours
        assert not (await group.tell("b#1", "starting")).yours
        assert (await group.tell("b#2", "starting", "n:1")).yours
        await group.tell("a#1", "awake")
        # The wait of its group is over after 7 s.
        assert not (await group.tell("b#1", "asleep", waited_s=7.0)).yours
        assert not (await group.tell("a#1", "awake")).yours
        states = {
            device: {member.report.model: member.report.state for member in rota.members.values()}
            for (_, device), rota in group.turns.rotas.items()
        }
        assert states == {"n:0": {"a": "awake", "b": "asleep"}, "n:1": {"b": "starting"}}


async def test_the_device_of_an_engine_whose_process_has_ended_is_given_on() -> None:
    async with running() as group:
        await group.tell("a#1", "awake")
        assert not (await group.tell("b#1", "asleep")).yours
        group.clock.now += 10 * SILENT_S
        # It is silent, but lives, and has the memory of the device.
        await group.turns.look()
        assert not (await group.tell("b#1", "asleep")).yours
        group.living = {"b#1"}
        await group.turns.look()
        assert (await group.tell("b#1", "asleep")).yours


async def test_one_that_reports_is_not_looked_for() -> None:
    async with running() as group:
        group.living = AssertionError("not asked")
        await group.tell("a#1", "awake")
        group.clock.now += SILENT_S
        await group.turns.look()


async def test_it_is_unhealthy_once_it_looks_no_more() -> None:
    async with running() as group:
        await group.turns.check_health()
        task: asyncio.Task[Any] = group.turns._task
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(asyncio.CancelledError):
            await group.turns.check_health()
