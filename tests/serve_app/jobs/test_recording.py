from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic_core import from_json

from serve_app.jobs import failpoints
from serve_app.jobs.content import Content, Contents
from serve_app.jobs.errors import ContentLostError
from serve_app.jobs.plan import unsent
from serve_app.jobs.rows import Row, answered
from serve_app.jobs.storage import close, give_up, record, whole
from tests.serve_app.jobs.helpers import (
    NOW,
    batch_of,
    bytes_of,
    ids_on_disk,
    on_disk,
    opened,
    put,
    row,
    text_of,
)

ROWS = [Row(number, text_of(row(f"r{number}"))) for number in (1, 2, 3)]


def test_results_are_written_once_whatever_the_commit_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"".join(row.text for row in ROWS))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=3)
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    results = [answered("b", ROWS[0], 200, {"usage": usage}), answered("b", ROWS[1], 404, {})]

    def fail(point: str) -> None:
        if point in failing:
            raise OSError("the disk fails")

    failing: list[str] = []
    monkeypatch.setattr(failpoints, "hook", fail)
    for point in ("content.appended", "store.commit", "store.committed"):
        failing[:] = [point]
        with pytest.raises(OSError, match="the disk fails"):
            record(store, content, "b", results)
    failing.clear()
    record(store, content, "b", results)
    batch = store.batch("b")
    assert (batch.completed, batch.failed, batch.unrun) == (1, 1, 0)
    assert (batch.input_tokens, batch.output_tokens) == (5, 2)
    assert bytes_of(content, batch.output_file, batch.output_bytes) == results[0].text
    assert bytes_of(content, batch.error_file, batch.error_bytes) == results[1].text
    left = unsent(store, content, batch)
    assert left.take(content) == [Row(ROWS[2].line, ROWS[2].text.strip(), "demo")]

    close(store, content, store.move("b", "cancelling", NOW), NOW)
    batch = store.batch("b")
    assert (batch.state, batch.completed, batch.failed, batch.unrun) == ("cancelled", 1, 2, 1)
    last = from_json(content.path(batch.error_file).read_bytes().splitlines()[1])
    assert (last["custom_id"], last["error"]["code"]) == ("r3", "batch_cancelled")
    store.close()


def test_a_batch_whose_input_has_lost_rows_does_not_end_as_if_it_were_complete(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"".join(row.text for row in ROWS))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=3)
    record(store, content, "b", [answered("b", ROWS[0], 200, {})])
    content.path("in").write_bytes(ROWS[0].text + ROWS[1].text)
    with pytest.raises(ContentLostError, match="in is not what it was"):
        close(store, content, store.move("b", "finalizing", NOW), NOW)
    batch = store.batch("b")
    assert (batch.state, batch.completed, batch.failed) == ("finalizing", 1, 1)
    store.close()


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_the_results_of_a_batch_that_lost_a_content_can_be_read(where: str, tmp_path: Path) -> None:
    store = opened(tmp_path)[0]
    content: Contents = on_disk(tmp_path)
    if where == "memory":
        pytest.importorskip("fsspec")
        from serve_app.jobs.object_storage import Objects

        content = Content(tmp_path, 1, Objects(f"memory://{uuid4().hex}"))
    put(store, content, "in", b"".join(row.text for row in ROWS))
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=3)
    results = [answered("b", ROWS[0], 200, {}), answered("b", ROWS[1], 404, {})]
    record(store, content, "b", results)
    batch = store.batch("b")
    content.remove(batch.error_file)
    # The output is written before it shows that the error file is gone.
    with pytest.raises(ContentLostError) as lost:
        record(store, content, "b", [answered("b", ROWS[2], status, {}) for status in (200, 500)])
    give_up(store, content, "b", str(lost.value), NOW)
    batch = store.batch("b")
    assert (batch.state, batch.completed, batch.failed) == ("failed", 1, 1)
    assert batch.errors[0]["code"] == "content_lost"
    file = store.file("anna", batch.output_file)
    assert file.bytes == content.size(batch.output_file) == len(results[0].text)
    assert b"".join(content.pieces(file.id, file.bytes)) == results[0].text
    assert content.size(batch.error_file) is None
    store.close()


def test_results_of_a_batch_that_was_given_up_while_the_disk_failed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", ROWS[0].text)
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=1)
    record(store, content, "b", [answered("b", ROWS[0], 200, {})])
    output = bytes_of(content, "file-b-out", store.batch("b").output_bytes)

    def fail(point: str) -> None:
        if point == "content.rename":
            raise OSError("the disk fails")

    monkeypatch.setattr(failpoints, "hook", fail)
    with pytest.raises(OSError, match="the disk fails"):
        give_up(store, content, "b", "the content of in is gone", NOW)
    monkeypatch.setattr(failpoints, "hook", None)
    file = store.file("anna", "file-b-out")
    assert content.size(file.id) is None
    assert whole(content, file)
    assert content.path(file.id).read_bytes() == output
    content.path(file.id).unlink()
    assert not whole(content, file)
    assert not whole(content, replace(file, id="in", purpose="batch"))
    store.close()


def test_a_batch_that_lost_its_input_before_its_first_result_leaves_no_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", ROWS[0].text)
    store.add_batch(batch_of("b", "in"), 1)
    store.move("b", "in_progress", NOW, total=1)

    def fail(point: str) -> None:
        if point == "content.synced":
            raise OSError("the disk fails")

    monkeypatch.setattr(failpoints, "hook", fail)
    with pytest.raises(OSError, match="the disk fails"):
        record(store, content, "b", [answered("b", ROWS[0], 200, {})])
    monkeypatch.setattr(failpoints, "hook", None)
    content.remove("in")
    give_up(store, content, "b", "the content of in is gone", NOW)
    assert ids_on_disk(content) == set()
    store.close()
