from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.ledger.closing import Closer
from serve_app.ledger.disk import DRAFT
from serve_app.ledger.files import lock_path, open_path, segment_path
from serve_app.ledger.rows import encode
from tests.serve_app.ledger.crashing import FOLDER, Clock, MemoryDisk, Store
from tests.serve_app.ledger.ledgers import row

TODAY = "2027-01-15"
LINE = encode(row(1))


class Segments:
    """Segments of several processes in one folder, and the process `a` that closes them."""

    def __init__(self) -> None:
        self.store = Store()
        self.disk = MemoryDisk(self.store)
        self.growing: frozenset[Path] = frozenset()

    def add(self, number: int, *, day: str = TODAY, name: str = "a", content: bytes = LINE) -> Path:
        path = segment_path(FOLDER, day, name, number)
        self.store.files[path] = content
        return path

    def closer(self, **options: Any) -> Closer:
        return Closer(FOLDER, "a", self.disk, growing=lambda: self.growing, clock=Clock(), **options)

    @property
    def paths(self) -> set[Path]:
        return set(self.store.files)


def packed(content: bytes) -> bytes:
    return b"PAR1" + content


def upload_to(uploaded: list[Path], failures: int = 0) -> Callable[[Path], None]:
    """Return an upload that fails so many times before it works."""
    left = iter([True] * failures)

    def upload(path: Path) -> None:
        if next(left, False):
            raise OSError("no such bucket")
        uploaded.append(path)

    return upload


def test_closed_segments_of_this_process_are_compacted() -> None:
    segments = Segments()
    closed, grows, other = segments.add(0), segments.add(1), segments.add(0, name="b")
    segments.growing = frozenset({grows})
    segments.closer(compact=packed).close_segments()
    assert segments.paths == {closed.with_suffix(".parquet"), grows, other}
    assert segments.store.files[closed.with_suffix(".parquet")] == packed(LINE)


def test_without_compaction_and_upload_segments_stay_as_they_are() -> None:
    segments = Segments()
    path = segments.add(0)
    segments.closer().close_segments()
    assert segments.store.files == {path: LINE}


def test_a_segment_that_can_not_be_compacted_is_tried_once_and_uploaded_as_it_is() -> None:
    segments, tried, uploaded = Segments(), [], list[Path]()
    path = segments.add(0, content=b"no row\n")

    def compact(content: bytes) -> bytes:
        tried.append(content)
        raise ValueError("it has no rows")

    closer = segments.closer(compact=compact, upload=upload_to(uploaded, failures=1))
    with pytest.raises(OSError, match="no such bucket"):
        closer.close_segments()
    assert segments.paths == {path}
    closer.close_segments()
    assert (tried, uploaded, segments.paths) == ([b"no row\n"], [path], set())


def test_an_upload_that_fails_goes_on_with_the_same_segment() -> None:
    segments, uploaded = Segments(), list[Path]()
    first, second = segments.add(0), segments.add(1)
    closer = segments.closer(upload=upload_to(uploaded, failures=1))
    with pytest.raises(OSError, match="no such bucket"):
        closer.close_segments()
    assert segments.paths == {first, second}
    closer.close_segments()
    assert uploaded == [first, second]
    assert not segments.paths


def test_a_draft_of_a_crash_is_removed_and_never_uploaded() -> None:
    segments, uploaded = Segments(), list[Path]()
    path = segments.add(0)
    segments.store.files[path.with_name(path.name + DRAFT)] = b"half of"
    segments.closer(upload=upload_to(uploaded)).close_segments()
    assert uploaded == [path]
    assert not segments.paths


def test_segments_of_old_days_are_removed_but_those_that_grow() -> None:
    segments = Segments()
    old, grows, other = (
        segments.add(0, day="2027-01-11"),
        segments.add(1, day="2027-01-11"),
        segments.add(0, day="2027-01-10", name="b"),
    )
    young = segments.add(2, day="2027-01-12")
    segments.growing = frozenset({grows})
    segments.closer().remove_old()
    assert segments.paths == {old, grows, other, young}
    segments.closer(keep_s=3 * 86_400).remove_old()
    assert segments.paths == {grows, young}


def test_the_spool_is_counted_in_bytes_of_all_processes() -> None:
    segments = Segments()
    segments.add(0)
    segments.add(0, name="b")
    segments.store.files[open_path(FOLDER, "a")] = LINE
    assert segments.closer().spool_bytes() == 2 * len(LINE)


def test_only_the_work_of_dead_processes_is_finished() -> None:
    segments, uploaded = Segments(), list[Path]()
    dead, alive = segments.add(0, name="b"), segments.add(0, name="c")
    segments.store.files[lock_path(FOLDER, "b")] = b""
    assert MemoryDisk(segments.store).lock(lock_path(FOLDER, "c"))
    segments.closer(upload=upload_to(uploaded)).adopt()
    assert uploaded == [dead]
    assert segments.paths == {alive, lock_path(FOLDER, "c")}


def test_work_of_a_dead_process_that_fails_is_left_to_the_next_call() -> None:
    segments, uploaded = Segments(), list[Path]()
    path, lock = segments.add(0, name="b"), lock_path(FOLDER, "b")
    segments.store.files[lock] = b""
    closer = segments.closer(upload=upload_to(uploaded, failures=1))
    with pytest.raises(OSError, match="no such bucket"):
        closer.adopt()
    assert segments.paths == {path, lock}
    assert not segments.disk.locked(lock)
    closer.adopt()
    assert uploaded == [path]
    assert not segments.paths
