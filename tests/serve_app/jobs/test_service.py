"""The parts of the batches in one process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic_core import to_json

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.jobs import service as service_module
from serve_app.jobs.errors import StoreError
from serve_app.jobs.service import BatchesMetrics, BatchService
from serve_app.jobs.store import Store
from serve_app.settings.batches import BatchesSettings
from serve_app.system.database import DatabaseError
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.wire.frame import unpack
from serve_app.wire.request import RelayRequest
from tests.progress import STILL_S
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import CHAT, batch_of, commits, opened, put, row, text_of

LIMIT_S = STILL_S


@asynccontextmanager
async def running(folder: Path, engine: Engine) -> AsyncIterator[BatchService]:
    service = await BatchService.open(BatchesSettings(folder=str(folder)), engine, {"demo"})
    try:
        yield service
    finally:
        await service.close(5.0)


async def get(service: BatchService, path: str) -> bytes:
    messages = service.relay(RelayRequest("GET", path, b"", [], b""))
    return b"".join([unpack(message).body async for message in messages])


def fill(folder: Path, *rows: JSON | bytes, hours: int = 10**7) -> None:
    """Leave a folder as a process does that was killed before its batch began."""
    store, content = opened(folder)
    put(store, content, "file-in", text_of(*rows), "default")
    ends = int(time.time()) + hours * 3600
    store.add_batch(batch_of("batch_1", "file-in", "default", expires_at=ends), 1)
    store.close()


async def test_a_start_goes_on_with_what_is_there(tmp_path: Path) -> None:
    fill(tmp_path, row("a"), row("b"))
    store, content = opened(tmp_path)
    store.note_content("file-orphan")
    content.keep(content.draft(), "file-orphan")
    store.close()
    engine = Engine()
    with commits() as committed:
        async with running(tmp_path, engine) as service, asyncio.timeout(LIMIT_S):
            while b'"status":"completed"' not in await get(service, "/v1/batches/batch_1"):
                await committed.wait()
                committed.clear()
            service.check()
    assert engine.final == {"a": 1, "b": 1}
    assert not (tmp_path / "files" / "file-orphan").exists()


async def test_the_weight_of_a_relayed_request_reaches_the_engines(tmp_path: Path) -> None:
    engine = Engine()
    store, content = opened(tmp_path)
    put(store, content, "file-in", text_of(row("a")), "anna")
    store.close()
    fields = {"input_file_id": "file-in", "endpoint": CHAT, "completion_window": "24h"}
    request = RelayRequest("POST", "/v1/batches", b"", [], to_json(fields), Scheduling(1, "anna", weight=3.0))
    async with running(tmp_path, engine) as service, asyncio.timeout(LIMIT_S):
        head = unpack(await anext(service.relay(request))).head
        assert head is not None
        assert head.status == 200
        await engine.until(lambda: engine.weights == {"anna": 3.0})


async def test_a_start_goes_on_where_a_content_can_not_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = opened(tmp_path)
    store.note_content("left")
    store.close()
    # A folder is no content that could be deleted.
    (tmp_path / "files" / "left").mkdir()
    async with running(tmp_path, Engine()) as service:
        service.check()
    assert "contents without a file can't be deleted before the next start" in caplog.text
    store, _ = opened(tmp_path)
    assert store.noted_contents() == ["left"]
    store.close()


async def test_a_database_that_is_down_is_waited_for_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "POLL_S", 0.0)
    errors = ["refused", "refused", "starting up", "starting up", "starting up"]

    def store() -> Store:
        if errors:
            raise DatabaseError(errors.pop(0))
        return Store(tmp_path)

    async with asyncio.timeout(LIMIT_S):
        (await service_module._open_store(store, 2 * LIMIT_S)).close()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "batches: refused; waiting"),
        ("WARNING", "batches: starting up; waiting"),
    ]


async def test_a_database_that_can_never_work_is_not_waited_for(tmp_path: Path) -> None:
    def no_database(path: Path) -> None:
        path.write_bytes(b"not a database, by far" * 100)

    def torn(path: Path) -> None:
        opened(path.parent)[0].close()
        data = bytearray(path.read_bytes())
        data[100:200] = b"x" * 100
        path.write_bytes(data)

    for make in (no_database, torn):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / "batches.db")
        with pytest.raises(DatabaseError, match=r"batches\.db: "):
            async with asyncio.timeout(LIMIT_S):
                await BatchService.open(BatchesSettings(folder=str(folder)), Engine(), {"demo"})


async def test_rows_in_flight_at_the_end_are_sent_by_the_next_process(tmp_path: Path) -> None:
    fill(tmp_path, row("a"))
    stuck = Engine()
    stuck.go.clear()
    async with asyncio.timeout(LIMIT_S):
        service = await BatchService.open(BatchesSettings(folder=str(tmp_path)), stuck, {"demo"})
        await stuck.until(lambda: stuck.running == 1)
        await service.close(0.0)
        assert stuck.running == 0
        engine = Engine()
        async with running(tmp_path, engine):
            await engine.until(lambda: engine.tries["a"] == 1)


async def test_a_runner_that_has_failed_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("serve_app.jobs.batches.BatchRunner.run", fail)
    async with running(tmp_path, Engine()) as service:
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="broken"):
            service.check()


async def test_statistics_follow_the_rows(tmp_path: Path) -> None:
    fill(tmp_path, row("a"), row("bad"), row("c"))
    engine = Engine(lambda id: 400 if id == "bad" else 200)
    engine.go.clear()
    with commits() as committed:
        async with running(tmp_path, engine) as service, asyncio.timeout(LIMIT_S):
            await engine.until(lambda: engine.running == 3)
            stats = await service.stats()
            assert stats["batches"] == {"validating": 0, "in_progress": 1, "finalizing": 0, "cancelling": 0}
            assert stats["rows"] == {"waiting": 0, "in_flight": 3, "completed": 0, "failed": 0}
            assert (stats["files"], stats["eta_s"], stats["late"]) == (1, None, 0)
            engine.go.set()
            while (stats := await service.stats())["batches"]["in_progress"] or stats["files"] < 3:
                await committed.wait()
                committed.clear()
            assert stats["rows"] == {"waiting": 0, "in_flight": 0, "completed": 2, "failed": 1}
            assert (stats["oldest_s"], stats["rows_per_s"]) == (0, 0)


async def test_a_missing_variable_with_the_database_is_told(tmp_path: Path) -> None:
    settings = BatchesSettings(folder=str(tmp_path), database_env="SATURATE_NO_SUCH_VARIABLE")
    with pytest.raises(StoreError, match="has no variable SATURATE_NO_SUCH_VARIABLE"):
        await BatchService.open(settings, Engine(), {"demo"})


STATS: JSON = {
    "batches": {"validating": 1, "in_progress": 2, "finalizing": 0, "cancelling": 0},
    "rows": {"waiting": 5, "in_flight": 3, "completed": 7, "failed": 1},
    "eta_s": None,
    "oldest_s": 60,
    "late": 1,
    "bytes": 1000,
}


async def test_statistics_become_metrics() -> None:
    values: dict[tuple[str, ...], float] = {}

    def make(metric: catalogue.Metric):  # type: ignore[no-untyped-def]
        def record(value: float, labels: dict[str, str]) -> None:
            key = (metric.name, *labels.values())
            values[key] = values.get(key, 0) + value if metric.kind == "counter" else value

        return record

    async def stats() -> JSON:
        return STATS

    metrics = BatchesMetrics(stats, {"demo": 2}, Meters(catalogue.BATCHES, make))
    await metrics.report()
    await metrics.report()
    assert values == {
        ("saturate_lost_calls_total", "demo"): 2,
        ("saturate_batches_open", "validating"): 1,
        ("saturate_batches_open", "in_progress"): 2,
        ("saturate_batches_open", "finalizing"): 0,
        ("saturate_batches_open", "cancelling"): 0,
        ("saturate_batches_rows", "waiting"): 5,
        ("saturate_batches_rows", "in_flight"): 3,
        ("saturate_batches_rows_total", "completed"): 7,
        ("saturate_batches_rows_total", "failed"): 1,
        ("saturate_batches_oldest_seconds",): 60,
        ("saturate_batches_left_seconds",): 0,
        ("saturate_batches_late",): 1,
        ("saturate_batches_file_bytes",): 1000,
    }
