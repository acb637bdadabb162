"""Files and batches outlive a restart, belong to one tenant each, and keep to its limits."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.jobs.errors import StateError, StoreError
from serve_app.jobs.store import Store
from serve_app.rows.rows import Result
from tests.serve_app.jobs.conftest import Place
from tests.serve_app.jobs.helpers import DAY_S, NOW, batch_of, file_of, known_contents


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    store = Store(place())
    store.add_file(file_of("in"))
    yield store
    store.close()


def result(line: int, is_error: bool = False) -> Result:
    return Result(line, b'{"line": %d}' % line, is_error)


def reopened(store: Store, place: Place) -> Store:
    store.close()
    return Store(place())


def test_files_and_batches_are_there_after_a_restart(store: Store, place: Place) -> None:
    batch = batch_of("b", "in", metadata={"a": "ü"}, model="demo")
    store.add_batch(batch, 1)
    again = reopened(store, place)
    assert again.file("anna", "in") == file_of("in")
    assert again.batch("b") == batch
    again.close()


def test_the_latest_weight_holds_for_the_open_batches_of_a_tenant(store: Store) -> None:
    store.add_file(file_of("other", "ben"))
    store.add_batch(batch_of("ended", "in", weight=1.0), 9)
    store.end("ended", "failed", NOW)
    store.add_batch(batch_of("a", "in", weight=1.0), 9)
    store.add_batch(batch_of("ben", "other", "ben", weight=1.0), 9)
    store.add_batch(batch_of("b", "in", weight=4.0), 9)
    store.add_batch(batch_of("c", "in"), 9)
    weights = {id: store.batch(id).weight for id in ("ended", "a", "ben", "b", "c")}
    assert weights == {"ended": 1.0, "a": 4.0, "ben": 1.0, "b": 4.0, "c": None}


def test_a_name_with_a_nul_is_no_failure_of_the_database(store: Store) -> None:
    store.add_file(file_of("a", filename="x\0y.jsonl"))
    assert store.file("anna", "a").filename in ("x\0y.jsonl", "x\ufffdy.jsonl")


def test_pages_of_files(store: Store) -> None:
    for number in range(5):
        store.add_file(file_of(f"f{number}", purpose="batch_output"))
    first = store.files("anna", limit=2, purpose="batch_output")
    assert ([file.id for file in first.items], first.has_more) == (["f4", "f3"], True)
    last = store.files("anna", limit=3, after="f3", purpose="batch_output")
    assert ([file.id for file in last.items], last.has_more) == (["f2", "f1", "f0"], False)
    up = store.files("anna", order="asc", after="f2")
    assert [file.id for file in up.items] == ["f3", "f4"]


def test_pages_of_batches(store: Store) -> None:
    for number in range(3):
        store.add_batch(batch_of(f"b{number}", "in"), 3)
    first = store.batches("anna", limit=2)
    assert ([batch.id for batch in first.items], first.has_more) == (["b2", "b1"], True)
    last = store.batches("anna", limit=2, after="b1")
    assert ([batch.id for batch in last.items], last.has_more) == (["b0"], False)


def test_the_oldest_ended_batches_of_a_tenant_make_space_for_new_ones(store: Store) -> None:
    store.add_file(file_of("other", "ben"))
    store.add_batch(batch_of("ben", "other", "ben"), 9, 3)
    store.end("ben", "failed", NOW)
    assert store.add_batch(batch_of("open", "in"), 9, 3) == []
    for id in ("a", "b"):
        assert store.add_batch(batch_of(id, "in"), 9, 3) == []
        store.move(id, "in_progress", NOW, total=2)
        store.record({id: [result(1), result(2, True)]})
        store.move(id, "finalizing", NOW)
        store.end(id, "completed", NOW)
    store.remove_file("anna", "file-b-out")
    found = [store.add_batch(batch_of(id, "in"), 9, 3) for id in ("c", "d", "e")]
    assert [set(ids) for ids in found] == [{"file-a-out", "file-a-err"}, {"file-b-err"}, set()]
    assert {batch.id for batch in store.batches("anna").items} == {"open", "c", "d", "e"}
    assert [batch.id for batch in store.batches("ben").items] == ["ben"]
    assert {"file-a-out", "file-b-err"}.isdisjoint(known_contents(store))


def test_a_batch_takes_the_ways_of_the_table_only(store: Store) -> None:
    store.add_batch(batch_of("b", "in"), 1)
    moved = store.move("b", "in_progress", NOW + 1, total=3, model="demo")
    assert (moved.state, moved.in_progress_at, moved.total, moved.model) == (
        "in_progress",
        NOW + 1,
        3,
        "demo",
    )
    store.move("b", "cancelling", NOW + 2)
    with pytest.raises(StateError, match="cancelling can't become finalizing"):
        store.move("b", "finalizing", NOW + 3)
    store.end("b", "cancelled", NOW + 3)
    with pytest.raises(StateError):
        store.end("b", "cancelled", NOW + 4)
    assert store.batch("b").cancelled_at == NOW + 3
    assert store.open_batches() == []


def test_rows_of_several_batches_are_committed_once(store: Store) -> None:
    for id in ("a", "b"):
        store.add_batch(batch_of(id, "in"), 2)
        store.move(id, "in_progress", NOW, total=3)
    results = {"a": [result(1), result(3, True)], "b": [result(2)]}
    for _ in range(2):
        store.record(results)
    size = len(result(1).text)
    after = store.batch("a")
    assert (after.completed, after.failed, after.output_bytes, after.error_bytes) == (1, 1, size, size)
    assert (store.finished("a", 1, 2), store.finished("b", 1, 3)) == ({1}, {2})
    store.record({"a": [result(2), result(3, True)]})
    assert [*store.results("a", False)] == [result(1).text, result(2).text]
    assert [*store.results("a", True)] == [result(3, True).text]
    assert (store.batch("a").completed, store.batch("a").failed) == (2, 1)
    store.end("b", "failed", NOW)
    with pytest.raises(AssertionError, match="not all of them are open"):
        store.record({"a": [result(4)], "b": [result(3)]})
    assert store.finished("a", 1, 9) == {1, 2, 3}


def test_the_results_of_a_batch_that_ended_are_files(store: Store) -> None:
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=1)
    store.record({"b": [result(1)]})
    store.move("b", "finalizing", NOW)
    assert {"file-b-out", "file-b-err"} <= known_contents(store)
    assert [file.id for file in store.files("anna").items] == ["in"]
    store.end("b", "completed", NOW + 5)
    file = store.file("anna", "file-b-out")
    size = len(result(1).text)
    assert (file.bytes, file.purpose, file.expires_at) == (size, "batch_output", NOW + 5 + DAY_S)
    assert known_contents(store) == {"in", "file-b-out"}


def test_results_of_ended_batches_are_removed_in_parts(store: Store) -> None:
    for id in ("ended", "open"):
        store.add_batch(batch_of(id, "in"), 2)
        store.move(id, "in_progress", NOW, total=2500)
        store.record({id: [result(line) for line in range(1, 2501)]})
    store.move("ended", "finalizing", NOW)
    store.end("ended", "completed", NOW)
    store.remove_left_results()
    assert store.finished("ended", 1, 2500) == set()
    assert len(store.finished("open", 1, 2500)) == 2500


def test_a_file_that_an_open_batch_reads_stays(store: Store) -> None:
    store.add_file(dataclasses.replace(file_of("old"), expires_at=NOW))
    store.add_file(dataclasses.replace(file_of("read"), expires_at=NOW))
    store.add_batch(batch_of("b", "read"), 1)
    assert store.remove_expired(NOW) == ["old"]
    store.end("b", "failed", NOW)
    assert store.remove_expired(NOW) == ["read"]


@pytest.mark.parametrize("left", [None, b""])
def test_contents_beside_a_missing_or_empty_database_are_not_taken_for_none(
    left: bytes | None, tmp_path: Path
) -> None:
    Store(tmp_path).close()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-1").write_bytes(b"{}")
    for file in tmp_path.glob("batches.db*"):
        file.unlink()
    if left is not None:
        (tmp_path / "batches.db").write_bytes(left)
    # Each start says it, not the first one alone.
    for _ in range(2):
        with pytest.raises(StoreError, match=r"batches\.db: it is missing or empty"):
            Store(tmp_path)
    (tmp_path / "files" / "file-1").unlink()
    Store(tmp_path).close()
