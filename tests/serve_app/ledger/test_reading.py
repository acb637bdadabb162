from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.ledger.closing import Closer
from serve_app.ledger.files import open_path
from serve_app.ledger.ledger import Ledger
from serve_app.ledger.parquet import to_parquet
from serve_app.ledger.reading import LedgerError, open_ledger, read
from serve_app.ledger.report import Report
from serve_app.ledger.rows import encode
from serve_app.relay.usage import Tokens
from tests.serve_app.ledger.crashing import (
    FOLDER,
    Clock,
    FakeSequence,
    MemoryDisk,
    Store,
    begun,
    book_of,
    call_of,
)
from tests.serve_app.ledger.ledgers import ROWS, START, lines, row, save


def test_a_segment_that_is_there_in_both_forms_counts_once(tmp_path: Path) -> None:
    save(tmp_path, "2027-01-15", "a.00000", ROWS, parquet=True)
    save(tmp_path, "2027-01-15", "a.00000", ROWS, parquet=False)
    assert sum(line.total.calls for line in lines(tmp_path, "tenant")) == 4


def test_other_files_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, "2027-01-15", "a.00000", ROWS, parquet=False)
    (tmp_path / "day=2027-01-15" / "a.00001.parquet.draft").write_bytes(b"PAR")
    (tmp_path / "prices.json").write_text("{}")
    assert sum(line.total.calls for line in lines(tmp_path, "tenant")) == 4


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "day=2027-01-15" / "a.00000.parquet"
    path.parent.mkdir()
    path.write_bytes(b"no")
    with pytest.raises(LedgerError, match=r"a\.00000\.parquet: it is no Parquet file"):
        lines(tmp_path, "tenant")


@pytest.mark.parametrize("place", ["/no folder", "~no user/usage"])
def test_a_folder_that_is_not_there_is_named(place: str) -> None:
    with pytest.raises(LedgerError, match=f"{place}: there is no such folder"):
        open_ledger(place)


class Moving(MemoryDisk):
    """Files of which the process dies and is cleaned up behind between two steps of a reader."""

    def __init__(self, store: Store, when: int, closer: Closer) -> None:
        super().__init__(store)
        self._left = when
        self._closer = closer

    def _pass(self) -> None:
        if self._left == 0:
            self._closer.adopt()
        self._left -= 1

    def files(self, folder: Path, pattern: str) -> list[Path]:
        self._pass()
        return super().files(folder, pattern)

    def read(self, path: Path) -> bytes:
        self._pass()
        return super().read(path)


@settings(max_examples=60, deadline=None)
@given(when=st.integers(0, 8), parquet=st.booleans())
def test_a_reader_counts_each_call_once_while_files_move(when: int, parquet: bool) -> None:
    store, clock = Store(), Clock(START)
    disk, book = MemoryDisk(store), book_of("a", clock)
    ledger = Ledger(book, FOLDER, disk=disk, clock=clock, now=clock)
    for ends in (True, False):
        call = call_of(book)
        slot = begun(call, FakeSequence(Tokens(output=5)))
        if ends:
            slot.end()
            call.close()
    ledger.round()
    disk.die()
    closer = Closer(
        FOLDER, "b", MemoryDisk(store), growing=frozenset, compact=to_parquet if parquet else None
    )
    report = read(Moving(store, when, closer), FOLDER, Report(["tenant"]))
    assert [line.total[:4] for line in report.lines()] == [(2, 0, 0, 10)]


def test_states_count_with_the_time_they_have(tmp_path: Path) -> None:
    path = open_path(tmp_path, "a")
    path.parent.mkdir()
    path.write_bytes(encode(row(1, outcome="running", output_tokens=2)))
    assert [line.values for line in lines(tmp_path, "outcome")] == [("lost",)]
    assert lines(tmp_path, "outcome", since=datetime(2027, 2, 1, tzinfo=UTC)) == []
