"""Two processes own the batches at once: nothing is lost, and nothing is doubled.

The first one is paused at a failpoint, and loses its connections. The second one takes over, and runs to the
end or is paused too while the first one goes on.
"""

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from serve_app.jobs import failpoints
from serve_app.jobs.content import Content
from serve_app.jobs.store import Store
from serve_app.system.database import DatabaseError, FencedError
from tests.progress import STILL_S
from tests.serve_app.jobs.crash import inline
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import lose_connections
from tests.serve_app.jobs.server import Server
from tests.serve_app.jobs.test_kills import Schedule, disk

__all__ = ["disk"]


class TwoOwners(Schedule):
    """One plan, run by two processes, of which each has a thread here. One of them runs at a time.

    Args:
        seed: Source of all that happens.
        folder: Folder of the processes.
        monkeypatch: Undoes the changes.
        database: URL of the database; None: SQLite in the folder.
        at: Number of the failpoint at which the first one is paused; None: any.

    Attributes:
        paused: The failpoint at which the first one was paused.
        fenced: Whether it was ended as one that was taken over.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        database: str | None = None,
        at: int | None = None,
    ) -> None:
        super().__init__(seed, folder, monkeypatch, database=database)
        self.paused = ""
        self.fenced = False
        self._left = at or self.random.randint(1, 60)
        self._left_of_second = self.random.randint(1, 60) if self.random.random() < 0.6 else -1
        self._second_waits = False
        self._thread: threading.Thread | None = None
        self._to_first, self._to_second = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self._engines = [self.engine]

    async def run(self) -> None:
        """Run both to their ends."""
        self.folder.mkdir(parents=True)
        with self._patch.context() as patch:
            patch.setattr(asyncio, "to_thread", inline)
            patch.setattr(failpoints, "hook", self._reach)
            try:
                await self._live()
            except* FencedError:
                assert self.paused
                self.fenced = True
            self._second_waits = False
            self._to_second.set()
            if self._thread:
                self._thread.join(STILL_S)
                assert not self._thread.is_alive()
        for error in self._errors:
            if not isinstance(error, FencedError):
                others = error.split(FencedError)[1] if isinstance(error, BaseExceptionGroup) else error
                if others is not None:
                    raise others
            # One that was paused while it took over may be the last one to do so.
            assert not self.fenced

    def check(self) -> None:
        """Check the invariants on the disk."""
        super().check()
        assert all(engine.most <= self.limit for engine in self._engines)

    def _open(self) -> Store:
        while True:
            with suppress(DatabaseError):
                if self._second_waits and self._life() == "first":
                    # It would wait for the end of the second one.
                    raise FencedError
                return Store(self._database or self.folder)

    def _life(self) -> str:
        return "second" if threading.current_thread() is self._thread else "first"

    def _ask_for(self, store: Store, content: Content[Path], name: str) -> None:
        # An owner that was taken over would try this for ever.
        store.open_batches()
        super()._ask_for(store, content, name)

    def _reach(self, point: str) -> None:
        if point == "store.commit" and self._database is None:
            # A transaction that is open keeps all others of SQLite waiting, as long as its process is there.
            return
        if self._life() == "first":
            self._left -= 1
            if not self._left:
                self.paused = point
                self._start_second()
        else:
            self._left_of_second -= 1
            if not self._left_of_second:
                self._second_waits = True
                self._to_first.set()
                assert self._to_second.wait(STILL_S)

    def _start_second(self) -> None:
        if self.runner:
            # Their answers may count no more, whatever becomes of them.
            self.again += self.runner.rows.in_flight
        if self._database:
            # A transaction that is open keeps the second one waiting until the server ends it.
            lose_connections(self._database)
        second = Engine(self.plan.status, self.random)
        second.final = self.engine.final
        self.engine = second
        self._engines.append(second)
        self._thread = threading.Thread(target=self._run_second)
        self._thread.start()
        assert self._to_first.wait(STILL_S)

    def _run_second(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._to_first.set()


async def run_both(
    schedules: Callable[[int], TwoOwners], seeds: range, folder: Path
) -> tuple[Counter[str], Counter[bool]]:
    """Run schedules; return where the first owner was paused, and whether it was fenced then."""
    points: Counter[str] = Counter()
    fenced: Counter[bool] = Counter()
    for seed in seeds:
        schedule = schedules(seed)
        try:
            await schedule.run()
            schedule.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, the first paused at {schedule.paused!r}, fenced {schedule.fenced}")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if schedule.paused:
            points[schedule.paused] += 1
            fenced[schedule.fenced] += 1
    print(f"{points.total()} pauses: {dict(points)}, fenced: {dict(fenced)}")
    return points, fenced


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(1000), marks=pytest.mark.long)], ids=len)
@pytest.mark.timeout(1800)
async def test_two_owners_lose_and_double_nothing(
    seeds: range, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = disk / "both"
    points, fenced = await run_both(lambda seed: TwoOwners(seed, folder, monkeypatch), seeds, folder)
    assert points.total() > len(seeds) / 2
    assert fenced[True] > len(seeds) / 3


async def test_the_first_owner_is_paused_at_every_point(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = disk / "both"
    points, _ = await run_both(lambda at: TwoOwners(3, folder, monkeypatch, at=at + 1), range(100), folder)
    assert set(points) >= {
        "store.committed",
        "content.sync",
        "content.rename",
        "content.renamed",
        "content.kept",
    }


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(200), marks=pytest.mark.long)], ids=len)
@pytest.mark.timeout(1800)
async def test_two_owners_of_one_database_in_postgresql(
    seeds: range, disk: Path, monkeypatch: pytest.MonkeyPatch, postgres: Server
) -> None:
    folder = disk / "both"

    def schedule(seed: int) -> TwoOwners:
        return TwoOwners(seed, folder, monkeypatch, postgres.database())

    points, fenced = await run_both(schedule, seeds, folder)
    assert points.total() > len(seeds) / 2
    assert fenced[True] > len(seeds) / 3
