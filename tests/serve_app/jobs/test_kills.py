"""No schedule of kills loses a row, repeats one in the output, or does more again than was in flight."""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.client import Backoff
from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.content import Content
from serve_app.jobs.errors import StateError
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.models import ENDED, Batch
from serve_app.jobs.storage import delete_noted
from serve_app.jobs.store import Store
from serve_app.rows.pacing import Fixed
from serve_app.system.database import DatabaseError
from tests.fakes.disk import KilledError
from tests.progress import STILL_S
from tests.serve_app.jobs.crash import FAULTS, Crash, inline
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import (
    DAY_S,
    NOW,
    batch_of,
    ids_on_disk,
    known_contents,
    limits_of,
    on_disk,
    put,
    row,
    text_of,
)
from tests.serve_app.jobs.server import Server

LIVES = 8
"""Most processes of a schedule; the last one isn't killed."""

TICK_S = 0.001
"""Seconds until a write that failed is tried again."""


@dataclass
class Plan:
    """The batches of a schedule, and what happens to them.

    Attributes:
        random: Source of all that isn't fixed.
        texts: Input files by name, which is the name of their batch too.
        tenants: Tenants of the batches.
        cancel: A batch that is cancelled after some answers.
        expire: Number of answers after which all completion windows end.
    """

    random: Random
    texts: dict[str, bytes] = field(default_factory=dict)
    tenants: dict[str, str] = field(default_factory=dict)
    cancel: tuple[str, int] | None = None
    expire: int | None = None

    def __post_init__(self) -> None:
        random = self.random
        for number in range(random.randint(1, 3)):
            name = f"b{number}"
            self.tenants[name] = random.choice(("anna", "ben"))
            rows = [row(f"{name}-{count}") for count in range(random.randint(1, 25))]
            for one in rows:
                # Rows that share a beginning are sent together.
                one["body"]["system"] = random.choice("xyz") * random.choice((0, 1000))
            self.texts[name] = text_of(*rows)
        if random.random() < 0.3:
            self.cancel = random.choice(list(self.texts)), random.randrange(20)
        if random.random() < 0.3:
            self.expire = random.randrange(30)

    def status(self, custom_id: str) -> int:
        """Return the status of a try. A row that is refused is so each time."""
        if sum(custom_id.encode()) % 7 == 0:
            return 400
        if (chance := self.random.random()) < 0.05:
            raise ConnectionError("gone")
        return 429 if chance < 0.1 else 503 if chance < 0.15 else 200


class Schedule:
    """One plan, run through several processes.

    Attributes:
        points: The failpoints at which they were killed.
        failed: The failpoints at which writes failed.
        again: Most rows that may be done again.

    Args:
        seed: Source of all that happens.
        folder: Folder of the processes' folders.
        monkeypatch: Undoes the changes.
        faulty: Whether writes fail too.
        database: URL of the database; None: SQLite in the folder, which is copied as the kill leaves it.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        faulty: bool = False,
        database: str | None = None,
    ) -> None:
        self.random = Random(seed)
        self.plan = Plan(self.random)
        self.points: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.again = 0
        self.limit = self.random.randint(1, 8)
        self.now = float(NOW)
        self.folder = folder / "life0"
        self._patch = monkeypatch
        self._faults = Random(seed) if faulty else None
        self._database = database
        self.engine = Engine(self.plan.status, self.random)
        self.runner: BatchRunner | None = None

    async def run(self) -> None:
        """Run processes until one comes to the end."""
        self.folder.mkdir(parents=True)
        for life in range(1, LIVES + 1):
            after = self.folder.parent / f"life{life}"
            at = None if life == LIVES else self.random.randint(1, 60)
            power = self.random if self.random.random() < 0.5 else None
            with self._patch.context() as patch:
                crash = Crash(self.folder, at, after, power, self._faults, patch)
                patch.setattr(asyncio, "to_thread", inline)
                try:
                    await self._live()
                except (KilledError, BaseExceptionGroup):
                    # What else goes wrong in a process that is dead already says nothing.
                    if crash.point is None:
                        raise
            self.failed += crash.failed
            if crash.point is None:
                return
            self.points[crash.point] += 1
            self.folder = after

    async def _live(self) -> None:
        store = runner = None
        # Another owner, which begins before this one has its runner, has engines of its own.
        engine = self.engine
        try:
            store = self._open()
            content = on_disk(self.folder, store.epoch)
            with suppress(OSError, DatabaseError):
                # As the service does: they stay noted.
                delete_noted(store, content)
            runner = BatchRunner(
                store,
                content,
                engine,
                KeyRules({"demo"}, limits_of()),
                concurrency=lambda: Fixed(self.limit),
                backoff=Backoff(0.0, 0.0),
                clock=lambda: self.now,
                tick_s=TICK_S,
            )
            self.runner = runner
            async with asyncio.timeout(STILL_S):
                await self._work(store, content, runner)
        finally:
            if runner is not None:
                self.again += runner.rows.in_flight
            if store is not None:
                store.close()

    def _open(self) -> Store:
        while True:
            # As the service does when it starts.
            with suppress(DatabaseError):
                return Store(self._database or self.folder)

    async def _work(self, store: Store, content: Content[Path], runner: BatchRunner) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run())
            for name in self.plan.texts:
                while True:
                    # As a client does that has got a 503.
                    with suppress(OSError, DatabaseError):
                        self._ask_for(store, content, name)
                        break
                runner.notice()
            while store.open_batches():
                self._happen(store, runner)
                await asyncio.sleep(0)
            runner.stop()

    def _ask_for(self, store: Store, content: Content[Path], name: str) -> None:
        """Upload a file and create its batch, unless an earlier life has done so."""
        tenant = self.plan.tenants[name]
        if any(batch.id == name for batch in store.batches(tenant).items):
            return
        ids = [file.id for file in store.files(tenant).items if file.id.startswith(f"in-{name}-")]
        if not ids:
            ids = [f"in-{name}-{self._life()}"]
            put(store, content, ids[0], self.plan.texts[name], tenant)
        store.add_batch(batch_of(name, ids[0], tenant, retention_s=30 * DAY_S), 10)

    def _life(self) -> str:
        """Return the name of the process."""
        return self.folder.name

    def _happen(self, store: Store, runner: BatchRunner) -> None:
        answers = sum(self.engine.final.values())
        if self.plan.cancel and answers >= self.plan.cancel[1]:
            with suppress(StateError, DatabaseError):
                store.move(self.plan.cancel[0], "cancelling", NOW)
                runner.notice()
        if self.plan.expire is not None and answers >= self.plan.expire and self.now == NOW:
            self.now = NOW + DAY_S + 1.0
            runner.notice()

    def check(self) -> None:
        """Check the invariants on the disk."""
        store = self._open()
        content = on_disk(self.folder, store.epoch)
        try:
            for name, text in self.plan.texts.items():
                self._check_batch(store, content, store.batch(name), text)
            delete_noted(store, content)
            assert ids_on_disk(content) == known_contents(store)
        finally:
            store.close()
        repeated = sum(count - 1 for count in self.engine.final.values())
        assert repeated <= self.again
        assert self.engine.most <= self.limit

    def _check_batch(self, store: Store, content: Content[Path], batch: Batch, text: bytes) -> None:
        assert b"".join(content.pieces(batch.input_file, len(text))) == text
        assert batch.state in ENDED - {"failed"}
        if batch.state == "cancelled" and not batch.total:
            return
        wanted = [from_json(line)["custom_id"] for line in text.splitlines()]
        output = _lines(store, content, batch, batch.output_file, batch.completed)
        errors = _lines(store, content, batch, batch.error_file, batch.failed)
        assert sorted([*output, *errors]) == sorted(wanted)
        assert batch.total == batch.completed + batch.failed == len(wanted)
        # Each answer of the double reports 3 and 2.
        assert (batch.input_tokens, batch.output_tokens) == (3 * len(output), 2 * len(output))
        codes = Counter(line["error"]["code"] for line in errors.values() if line["error"])
        assert codes.total() == batch.unrun
        assert set(codes) <= {"batch_cancelled" if batch.state == "cancelled" else "batch_expired"}
        assert (batch.state == "expired") == (batch.state != "cancelled" and batch.unrun > 0)
        for custom_id, line in output.items():
            assert line["response"]["status_code"] == 200
            assert line["response"]["body"]["echo"] == custom_id
            assert self.engine.final[custom_id]


def _lines(store: Store, content: Content[Path], batch: Batch, id: str, count: int) -> dict[str, JSON]:
    """Return the rows of a result file by `custom_id`."""
    if not count:
        return {}
    file = store.file(batch.tenant, id)
    assert file.bytes == content.path(id).stat().st_size
    rows = [from_json(line) for line in b"".join(content.pieces(id, file.bytes)).splitlines()]
    assert len(rows) == count
    lines = [int(row["custom_id"].partition("-")[2]) for row in rows]
    assert lines == sorted(lines), "rows are in the order of the input"
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == count, "a row is there twice"
    return found


async def run_schedules(
    seeds: range,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    faulty: bool = False,
    server: Server | None = None,
) -> tuple[Counter[str], Counter[str]]:
    """Run schedules; return the failpoints of all kills, and those of all writes that failed."""
    points: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for seed in seeds:
        database = None if server is None else server.database()
        schedule = Schedule(seed, folder / str(seed), monkeypatch, faulty, database)
        try:
            await schedule.run()
            schedule.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, kills at {dict(schedule.points)}, faults {dict(schedule.failed)}")
            raise
        points += schedule.points
        failed += schedule.failed
        shutil.rmtree(folder / str(seed))
    print(f"{points.total()} kills: {dict(points)}")
    print(f"{failed.total()} faults: {dict(failed)}")
    return points, failed


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: crashes are simulated, so that real syncs only take time."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


async def test_kills_at_writes(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, _ = await run_schedules(range(25), disk, monkeypatch)
    assert points.total() > 25
    assert set(points) >= {"store.commit", "store.committed", "content.rename", "content.kept"}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(10))
async def test_a_thousand_schedules(block: int, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, _ = await run_schedules(range(100 * block, 100 * (block + 1)), disk, monkeypatch)
    assert points.total() > 100


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(1000), marks=pytest.mark.long)], ids=len)
@pytest.mark.timeout(1800)
async def test_kills_while_writes_fail(seeds: range, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, failed = await run_schedules(seeds, disk, monkeypatch, faulty=True)
    assert points.total() > len(seeds)
    assert failed.keys() == FAULTS.keys()


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(200), marks=pytest.mark.long)], ids=len)
@pytest.mark.timeout(1800)
async def test_kills_with_postgresql(
    seeds: range, disk: Path, monkeypatch: pytest.MonkeyPatch, postgres: Server
) -> None:
    points, failed = await run_schedules(seeds, disk, monkeypatch, faulty=True, server=postgres)
    assert points.total() > len(seeds)
    assert failed.total() > 0
