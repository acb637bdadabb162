from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.jobs import failpoints
from serve_app.jobs.errors import DatabaseError, TooManyError
from serve_app.jobs.limits import Limits
from serve_app.jobs.models import Counts
from serve_app.jobs.storage import add_file, delete_contents, delete_noted, remove_expired
from tests.serve_app.jobs.helpers import DAY_S, NOW, batch_of, file_of, ids_on_disk, on_disk, opened, put


def test_files_are_deleted_when_their_time_is_over(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    for id in ("old", "read"):
        content.append(id, 0, b"x")
        store.add_file(replace(file_of(id), expires_at=NOW))
    store.add_batch(batch_of("b", "read"), 1)
    assert remove_expired(store, content, NOW - 1, Limits()) == 0
    assert remove_expired(store, content, NOW, Limits()) == 1
    assert ids_on_disk(content) == {"read"}
    store.end("b", "failed", NOW)
    assert remove_expired(store, content, NOW, Limits()) == 1
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
        content.append(id, 0, b"x")
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


def test_a_file_beyond_the_limits_leaves_no_content(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    draft = content.draft()
    draft.write(b"12")
    with pytest.raises(TooManyError):
        add_file(store, content, draft, file_of("in", size=2), Limits(max_tenant_bytes=1))
    assert ids_on_disk(content) == set()
    assert store.noted_contents() == []
    store.close()


@pytest.mark.parametrize("down", [False, True], ids=["once", "for longer"])
@pytest.mark.parametrize("point", ["content.rename", "content.renamed", "store.commit", "store.committed"])
def test_a_file_that_can_not_be_added_leaves_nothing_beyond_the_next_start(
    point: str, down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    draft = content.draft()
    draft.write(b"1")
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
        add_file(store, content, draft, file_of("in"), Limits())
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
        delete_contents(store, content, ["a", "b"])
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
    assert remove_expired(store, content, NOW, Limits(max_result_bytes=25)) == 2
    assert ids_on_disk(content) == {"out-2", "out-3", "in"}
    assert remove_expired(store, content, NOW, Limits(max_result_bytes=25)) == 0
    store.close()


def test_a_content_that_can_not_be_deleted_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = opened(tmp_path)
    for number in range(3):
        put(store, content, f"in-{number}", b"x")
    remaining = ["the storage fails"]

    def fail(point: str) -> None:
        if point == "content.remove" and remaining:
            raise OSError(remaining.pop())

    store.add_batch(batch_of("old", "in-0"), 1)
    store.end("old", "failed", NOW)
    with store._transaction() as db:
        db.change("UPDATE files SET expires_at = ?", NOW)
    monkeypatch.setattr(failpoints, "hook", fail)
    with pytest.raises(OSError, match="the storage fails"):
        remove_expired(store, content, NOW + 100 * DAY_S, Limits())
    assert len(ids_on_disk(content)) == 1
    assert store.batches("anna").items == []
    store.close()


def test_a_batch_goes_with_its_time_and_not_before_its_results(tmp_path: Path) -> None:
    store, content = opened(tmp_path)
    put(store, content, "in", b"x")
    limits = Limits(retention_s=10 * DAY_S)
    for id, retention_s in (("short", DAY_S), ("long", 20 * DAY_S), ("open", DAY_S)):
        store.add_batch(batch_of(id, "in", retention_s=retention_s), 9)
    content.append("file-long-out", 0, b"x")
    store.finish(store.move("long", "in_progress", NOW, total=1), [1], Counts(1, 0, 0, 1, 0))
    store.move("long", "finalizing", NOW)
    store.end("long", "completed", NOW)
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
    remove_expired(store, content, later + 30 * DAY_S - 1, Limits())
    assert [batch.id for batch in store.batches("anna").items] == ["b"]
    remove_expired(store, content, later + 30 * DAY_S, Limits())
    assert store.batches("anna").items == []
    store.close()
