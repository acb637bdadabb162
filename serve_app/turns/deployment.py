"""The Turns deployment: it decides which model of each group is awake, behind a deployment handle."""

import asyncio
import logging
import time
from collections.abc import Callable

from ray.exceptions import RayError
from ray.util import list_named_actors

from serve_app.settings.schema import Settings
from serve_app.settings.turns import ShareSettings
from serve_app.system.cpu_scheduling import use_batch_scheduling
from serve_app.system.garbage_collection import collect_rarely
from serve_app.system.rounds import Rounds
from serve_app.system.serve_logging import flush_warnings
from serve_app.turns.messages import Order, TurnReport
from serve_app.turns.rota import Rota

logger = logging.getLogger("ray.serve")

TICK_S = 1.0
"""Seconds between two checks for engines that have died."""

SILENT_S = 2.5
"""Seconds without a report after which an engine may have died: twice the longest pause between reports."""

OPENING_S = 5.0
"""Seconds after the start in which no free device is assigned: an engine that has it reports by then."""


def named_actors() -> set[str]:
    """Return the names of all living actors of the cluster."""
    return {actor["name"] for actor in list_named_actors(all_namespaces=True)}


class Turns:
    """Turns of the models that share devices. It has one replica, since one process keeps the rotas.

    Args:
        settings: The config's `args`, with models that have `share`.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        living: Callable[[], set[str]] = named_actors,
    ) -> None:
        flush_warnings()
        self._settings = settings
        self._clock = clock
        self._living = living
        self._opens_at = clock() + OPENING_S
        self.rotas: dict[tuple[str, str], Rota] = {}
        self._metrics = None
        if settings.telemetry.metrics:
            from serve_app.turns.metrics import TurnMetrics

            self._metrics = TurnMetrics(self.rotas)
        self._task = asyncio.get_running_loop().create_task(self._run())
        use_batch_scheduling()
        collect_rarely()

    async def exchange(self, report: TurnReport) -> Order:
        """Apply the report of an engine, and return its order."""
        key = (report.group, report.device)
        if key not in self.rotas:
            share = self._settings.share_groups.get(report.group, ShareSettings())
            self.rotas[key] = Rota(share.min_turn_s, share.max_wait_s, self._opens_at)
        return self.rotas[key].exchange(report, self._clock())

    async def check_health(self) -> None:
        """Raise an error if dead engines are no longer found, so that Serve replaces this replica."""
        if self._task.done():
            self._task.result()

    async def look(self) -> None:
        """Remove the engines that have died. An engine that is silent but alive may hold its device."""
        silent = [
            (rota, name)
            for rota in self.rotas.values()
            for name, member in rota.members.items()
            if self._clock() - member.at > SILENT_S
        ]
        if not silent:
            return
        living = await asyncio.to_thread(self._living)
        for rota, name in silent:
            if name not in living:
                logger.warning("%s has ended, and takes no more turns", name)
                rota.remove(name, self._clock())

    async def _run(self) -> None:
        rounds = Rounds("the report of the turns' metrics")
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.look()
            except RayError as error:
                logger.warning("Ray doesn't say which engines are alive: %r", error)
            except Exception:
                # The models continue to take turns.
                logger.exception("the engines that have ended are not removed from the turns")
            if self._metrics is not None:
                # A failure of telemetry must not stop the turns.
                with rounds.round():
                    self._metrics.report()

    async def __del__(self) -> None:
        if task := getattr(self, "_task", None):
            task.cancel()
