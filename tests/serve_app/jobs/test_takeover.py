"""A process beside another process that has taken over its batches."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.jobs.service import BatchService
from serve_app.jobs.store import Store
from serve_app.rows.rows import Result
from serve_app.settings.batches import BatchesSettings
from serve_app.system.database import FencedError
from tests.progress import STILL_S
from tests.serve_app.jobs.conftest import Place
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import NOW, batch_of, file_of, lose_connections, opened

CHANGES: dict[str, Callable[[Store], object]] = {
    "note_content": lambda store: store.note_content("x"),
    "forget_contents": lambda store: store.forget_contents(["noted"]),
    "add_file": lambda store: store.add_file(file_of("x")),
    "remove_file": lambda store: store.remove_file("anna", "free"),
    "remove_expired": lambda store: store.remove_expired(NOW * 2),
    "remove_excess": lambda store: store.remove_excess(0),
    "add_batch": lambda store: store.add_batch(batch_of("x", "in"), 9),
    "remove_expired_batches": lambda store: store.remove_expired_batches(NOW * 2, 0),
    "move": lambda store: store.move("b", "cancelling", NOW),
    "end": lambda store: store.end("b", "failed", NOW),
    "record": lambda store: store.record({"b": [Result(1, b"{}", False)]}),
    "open_batches": lambda store: store.open_batches(),
}
"""All calls that a store refuses once it was taken over."""


def taken_over(place: Place) -> tuple[Store, Store]:
    """Return a store with a file and a batch, and the store that has taken them over."""
    first = Store(place())
    first.add_file(file_of("in"))
    first.add_file(file_of("free"))
    first.note_content("noted")
    first.add_batch(batch_of("b", "in"), 9)
    return first, Store(place())


@pytest.mark.parametrize("call", CHANGES)
def test_a_store_that_was_taken_over_changes_nothing(call: str, tmp_path: Path) -> None:
    first, second = taken_over(lambda: tmp_path)
    with pytest.raises(FencedError, match="taken over"):
        CHANGES[call](first)
    assert second.batch("b") == first.batch("b") == batch_of("b", "in")
    assert second.noted_contents() == ["noted"]
    assert [file.id for file in second.files("anna").items] == ["free", "in"]
    CHANGES[call](second)
    for store in (first, second):
        store.close()


def test_an_owner_whose_connections_broke_is_told_that_it_was_taken_over(postgres_place: Place) -> None:
    first, second = taken_over(postgres_place)
    lose_connections(str(postgres_place()))
    for _ in range(2):
        with pytest.raises(FencedError):
            first.move("b", "cancelling", NOW)
        with pytest.raises(FencedError):
            first.open_batches()
    for store in (first, second):
        store.close()


async def test_a_service_that_was_taken_over_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "ray.serve")
    service = await BatchService.open(BatchesSettings(folder=str(tmp_path)), Engine(), {"demo"})
    service.check()
    store, _ = opened(tmp_path)
    service._runner.notice()
    async with asyncio.timeout(STILL_S):
        await asyncio.wait([service._running])
    with pytest.raises(BaseExceptionGroup) as ended:
        service.check()
    assert ended.group_contains(FencedError)
    (message,) = [one.getMessage() for one in caplog.records if one.name == "ray.serve"]
    assert message.startswith("batches: the runner has ended: ")
    assert message.count("another process has taken over these batches") == 1
    await service.close(1.0)
    assert store.open_batches() == []
    store.close()
