"""Changes of the database and of the contents together."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from pydantic_core import from_json

from serve_app.jobs import failpoints
from serve_app.jobs.content import Content
from serve_app.jobs.storage import close, delete_noted, give_up, remove_expired, unsent
from serve_app.rows.errors import RunError
from serve_app.rows.rows import Result, Row
from serve_app.system.database import DatabaseError
from tests.serve_app.jobs.helpers import (
    DAY_S,
    NOW,
    batch_of,
    bytes_of,
    failing_at,
    file_of,
    ids_on_disk,
    limits_of,
    on_disk,
    opened,
    put,
    result_of,
    row,
    text_of,
)


def test_files_are_deleted_when_their_time_is_over(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    for id in ("old", "read"):
        content.keep(content.draft(), id)
        store.add_file(replace(file_of(id), expires_at=NOW))
    store.add_batch(batch_of("b", "read"), 1)
    assert remove_expired(store, content, NOW - 1, limits_of()) == 0
    assert remove_expired(store, content, NOW, limits_of()) == 1
    assert ids_on_disk(content) == {"read"}
    store.end("b", "failed", NOW)
    assert remove_expired(store, content, NOW, limits_of()) == 1
    assert ids_on_disk(content) == set()
    store.close()


def test_contents_without_a_file_are_deleted(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    for id in ("in", "deleted"):
        put(store, content, id, b"x")
    batch = batch_of("b", "in")
    store.add_batch(batch, 1)
    # A process has ended before it deleted the content, and another one in the middle of an upload.
    store.remove_file("anna", "deleted")
    store.note_content("orphan")
    for id in ("orphan", batch.output_file):
        content.keep(content.draft(), id)
    assert delete_noted(store, content) == 2
    assert ids_on_disk(content) == {"in", batch.output_file}
    assert delete_noted(store, content) == 0
    store.close()


def test_contents_of_others_stay(tmp_path: Path) -> None:
    """The folder may be somebody's own, and a database the wrong one."""
    theirs, content = opened(tmp_path)
    put(theirs, content, "in", b"x")
    theirs.close()
    for folder in ("files", "drafts"):
        (tmp_path / folder / "thesis.tex").write_bytes(b"x")
    draft = content.draft()
    store, content = opened(tmp_path / "empty")[0], on_disk(tmp_path, theirs.epoch + 1)
    assert delete_noted(store, content) == 0
    assert ids_on_disk(content) == {"in", "thesis.tex"}
    assert [path.name for path in (tmp_path / "drafts").iterdir()] == ["thesis.tex"]
    draft.discard()
    store.close()


@pytest.mark.parametrize("down", [False, True], ids=["once", "for longer"])
@pytest.mark.parametrize("point", ["content.rename", "content.renamed", "store.commit", "store.committed"])
def test_a_file_that_can_not_be_added_leaves_nothing_after_a_start(
    point: str, down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    noted: list[str] = []

    def fail(reached: str) -> None:
        # The first commit is the note.
        if reached == "store.committed" and not noted:
            noted.append(reached)
        elif noted and reached == point:
            if not down:
                monkeypatch.setattr(failpoints, "hook", None)
            raise OSError if point.startswith("content") else DatabaseError

    monkeypatch.setattr(failpoints, "hook", fail)
    with pytest.raises((OSError, DatabaseError)):
        put(store, content, "in", b"1")
    monkeypatch.setattr(failpoints, "hook", None)
    assert store.files("anna").items == []
    assert (store.noted_contents() == []) is not (down and point.startswith("store"))
    delete_noted(store, content)
    assert ids_on_disk(content) == set()
    store.close()


def test_a_content_that_can_not_be_deleted_stays_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    for id in ("a", "b"):
        put(store, content, id, b"x")
        store.remove_file("anna", id)

    def fail(point: str) -> None:
        if point == "content.remove":
            monkeypatch.setattr(failpoints, "hook", None)
            raise OSError("the storage fails")

    monkeypatch.setattr(failpoints, "hook", fail)
    with pytest.raises(OSError, match="the storage fails"):
        delete_noted(store, content)
    assert (ids_on_disk(content), store.noted_contents()) == ({"a"}, ["a"])
    assert delete_noted(store, content) == 1
    assert ids_on_disk(content) == set()
    store.close()


def test_the_oldest_results_go_when_a_tenant_has_too_many_bytes(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    for number in range(4):
        draft = content.draft()
        draft.write(b"x" * 10)
        content.keep(draft, f"out-{number}")
        store.add_file(file_of(f"out-{number}", size=10, purpose="batch_output"))
    put(store, content, "in", b"x" * 100)
    store.add_file(file_of("other", "ben", size=25, purpose="batch_output"))
    assert remove_expired(store, content, NOW, limits_of(max_result_bytes=25)) == 2
    assert ids_on_disk(content) == {"out-2", "out-3", "in"}
    assert remove_expired(store, content, NOW, limits_of(max_result_bytes=25)) == 0
    store.close()


def test_a_content_that_can_not_be_deleted_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    for number in range(3):
        content.keep(content.draft(), f"in-{number}")
        store.add_file(replace(file_of(f"in-{number}"), expires_at=NOW))
    remaining = ["the storage fails"]

    def fail(point: str) -> None:
        if point == "content.remove" and remaining:
            raise OSError(remaining.pop())

    store.add_batch(batch_of("old", "in-0"), 1)
    store.end("old", "failed", NOW)
    monkeypatch.setattr(failpoints, "hook", fail)
    with pytest.raises(OSError, match="the storage fails"):
        remove_expired(store, content, NOW + 100 * DAY_S, limits_of())
    assert len(ids_on_disk(content)) == 1
    assert store.batches("anna").items == []
    store.close()


def test_a_batch_goes_with_its_time_and_not_before_its_results(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"x")
    limits = limits_of(retention_s=10 * DAY_S)
    for id, retention_s in (("short", DAY_S), ("long", 20 * DAY_S), ("open", DAY_S)):
        store.add_batch(batch_of(id, "in", retention_s=retention_s), 9)
    store.move("long", "in_progress", NOW, total=1)
    store.record({"long": [Result(1, b"{}\n", False)]})
    close(store, content, store.move("long", "finalizing", NOW), NOW)
    store.end("short", "failed", NOW)
    kept = {}
    for days in (10, 11, 19, 20):
        remove_expired(store, content, NOW + days * DAY_S, limits)
        kept[days] = {batch.id for batch in store.batches("anna").items}
    assert kept == {10: {"short", "long", "open"}, 11: {"long", "open"}, 19: {"long", "open"}, 20: {"open"}}
    assert ids_on_disk(content) == {"in"}
    store.close()


def test_a_batch_that_ended_after_its_window_is_kept_as_long(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"x")
    store.add_batch(batch_of("b", "in"), 1)
    later = NOW + 100 * DAY_S
    store.end("b", "failed", later)
    remove_expired(store, content, later + 30 * DAY_S - 1, limits_of())
    assert [batch.id for batch in store.batches("anna").items] == ["b"]
    remove_expired(store, content, later + 30 * DAY_S, limits_of())
    assert store.batches("anna").items == []
    store.close()


ROWS = [Row(number, text_of(row(f"r{number}"))) for number in (1, 2, 3)]


def test_results_are_written_once_whatever_the_commit_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"".join(row.text for row in ROWS))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=3)
    results = [result_of(ROWS[0]), result_of(ROWS[1], is_error=True)]

    def fail(point: str) -> None:
        if point in failing:
            raise OSError("the disk fails")

    failing: list[str] = []
    monkeypatch.setattr(failpoints, "hook", fail)
    for point in ("store.commit", "store.committed"):
        failing[:] = [point]
        with pytest.raises(OSError, match="the disk fails"):
            store.record({"b": results})
    failing.clear()
    store.record({"b": results})
    batch = store.batch("b")
    assert (batch.completed, batch.failed, batch.unrun) == (1, 1, 0)
    assert (batch.input_tokens, batch.output_tokens) == (5, 2)
    assert [b"".join(store.results("b", is_error)) for is_error in (False, True)] == [
        result.text for result in results
    ]
    left = unsent(store, batch)
    assert left.take(content) == [Row(ROWS[2].line, ROWS[2].text.strip(), "demo")]

    close(store, content, store.move("b", "cancelling", NOW), NOW)
    batch = store.batch("b")
    assert (batch.state, batch.completed, batch.failed, batch.unrun) == ("cancelled", 1, 2, 1)
    assert bytes_of(content, batch.output_file, batch.output_bytes) == results[0].text
    last = from_json(content.path(batch.error_file).read_bytes().splitlines()[1])
    assert (last["custom_id"], last["error"]["code"]) == ("r3", "batch_cancelled")
    store.close()


def test_a_batch_whose_input_lost_rows_does_not_end_as_complete(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"".join(row.text for row in ROWS))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=3)
    store.record({"b": [result_of(ROWS[0])]})
    content.path("in").write_bytes(ROWS[0].text + ROWS[1].text)
    with pytest.raises(RunError, match="in has changed"):
        close(store, content, store.move("b", "finalizing", NOW), NOW)
    batch = store.batch("b")
    assert (batch.state, batch.completed, batch.failed) == ("finalizing", 1, 1)
    store.close()


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_the_results_of_a_batch_that_lost_its_input_are_kept(where: str, tmp_path: Path) -> None:
    store = opened(tmp_path)[0]
    content: Content[Any] = on_disk(tmp_path)
    if where == "memory":
        pytest.importorskip("fsspec")
        from serve_app.jobs.object_storage import Objects

        content = Content(tmp_path, 1, Objects(f"memory://{uuid4().hex}"))
    put(store, content, "in", b"".join(row.text for row in ROWS))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=3)
    results = [
        result_of(ROWS[1], is_error=True),
        result_of(ROWS[2]),
        result_of(ROWS[0]),
    ]
    store.record({"b": results})
    content.remove("in")
    with failing_at("content.rename"), pytest.raises(OSError, match="the disk fails"):
        give_up(store, content, "b", "the content of in is gone", NOW)
    give_up(store, content, "b", "the content of in is gone", NOW)
    batch = store.batch("b")
    assert (batch.state, batch.completed, batch.failed) == ("failed", 2, 1)
    assert batch.errors[0]["code"] == "content_lost"
    # In the order of the input, whatever the order in which rows ended.
    assert bytes_of(content, "file-b-out", batch.output_bytes) == results[2].text + results[1].text
    assert bytes_of(content, "file-b-err", batch.error_bytes) == results[0].text
    assert store.file("anna", "file-b-out").bytes == content.size("file-b-out") == batch.output_bytes
    store.close()


def test_a_batch_that_lost_its_input_before_any_row_leaves_no_content(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", ROWS[0].text)
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=1)
    content.remove("in")
    give_up(store, content, "b", "the content of in is gone", NOW)
    assert ids_on_disk(content) == set()
    store.close()


def test_the_space_of_results_is_used_again(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"x")
    # Compressible lines and others.
    lines = [b'{"a": "%s"}' % Random(number).randbytes(2000).hex().encode() for number in range(1000)]
    sizes = []
    for id in ("a", "b"):
        store.add_batch(batch_of(id, "in"), 1)
        store.move(id, "in_progress", NOW, total=1000)
        store.record({id: [Result(number, line, False) for number, line in enumerate(lines)]})
        assert b"".join(store.results(id, False)) == b"".join(lines)
        close(store, content, store.move(id, "finalizing", NOW), NOW)
        sizes.append((tmp_path / "batches.db").stat().st_size)
    assert sizes[1] < 1.1 * sizes[0]
    store.close()
