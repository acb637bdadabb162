"""Sums over the files of a ledger."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.settings.usage import PriceSettings
from serve_app.usage.closing import Closer
from serve_app.usage.disk import LocalDisk
from serve_app.usage.files import open_path
from serve_app.usage.ledger import Ledger
from serve_app.usage.parquet import to_parquet
from serve_app.usage.prices import Prices
from serve_app.usage.reading import LedgerError, read
from serve_app.usage.report import BY, Line, Report
from serve_app.usage.rows import Row, Tokens, encode, utc
from tests.serve_app.usage.crashing import (
    FOLDER,
    Clock,
    FakeSequence,
    MemoryDisk,
    Store,
    book_of,
    call_of,
)

START = 1_800_000_000.0


def row(number: int, **fields: Any) -> Row:
    return Row(call=f"a-{number}", **({"time": utc(START)} | fields))


def save(folder: Path, day: str, name: str, rows: list[Row], *, parquet: bool) -> None:
    path = folder / f"day={day}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join(map(encode, rows))
    path.with_suffix(".parquet" if parquet else ".jsonl").write_bytes(to_parquet(lines) if parquet else lines)


def lines(folder: Path, *by: str, **options: Any) -> list[Line]:
    return read(LocalDisk(), folder, Report(by, **options)).lines()


ROWS = [
    row(1, tenant="a", model="m", prompt_tokens=10, cached_tokens=4, output_tokens=3, engine_s=0.5),
    row(2, tenant="b", model="m", prompt_tokens=100, output_tokens=5, wait_s=0.25),
    row(3, tenant="a", model="n", prompt_tokens=1, output_tokens=1, outcome="cancelled"),
    row(4, tenant="a", model="m", time=utc(START + 60), output_tokens=7, source="batch"),
]


@pytest.mark.parametrize("parquet", [False, True])
def test_rows_are_summed_by_the_columns_that_are_asked_for(tmp_path: Path, parquet: bool) -> None:
    save(tmp_path, "2027-01-15", "a.00000", ROWS, parquet=parquet)
    found = lines(tmp_path, "tenant")
    assert [line.values for line in found] == [("b",), ("a",)]
    total = found[1].total
    assert (total.calls, total.prompt_tokens, total.cached_tokens, total.output_tokens) == (3, 11, 4, 11)
    assert (total.engine_s, found[0].total.wait_s, total.price) == (0.5, 0.25, None)
    pairs = {line.values: line.total.output_tokens for line in lines(tmp_path, "tenant", "model")}
    assert pairs == {("a", "m"): 10, ("b", "m"): 5, ("a", "n"): 1}
    assert [line.values for line in lines(tmp_path, "day")] == [("2027-01-15",)]
    assert {line.values[0] for line in lines(tmp_path, "outcome")} == {"ok", "cancelled"}


@pytest.mark.parametrize("parquet", [False, True])
def test_only_calls_of_the_wanted_time_count(tmp_path: Path, parquet: bool) -> None:
    save(tmp_path, "2027-01-15", "a.00000", ROWS, parquet=parquet)
    later = datetime.fromtimestamp(START + 60, UTC)
    assert sum(line.total.calls for line in lines(tmp_path, "key", since=later)) == 1
    assert sum(line.total.calls for line in lines(tmp_path, "key", until=later)) == 3
    assert lines(tmp_path, "key", since=datetime(2027, 1, 16, tzinfo=UTC)) == []


def test_the_price_is_that_of_each_call(tmp_path: Path) -> None:
    save(tmp_path, "2027-01-15", "a.00000", ROWS, parquet=True)
    prices = Prices({"m": PriceSettings(input=0.0, output=1_000_000.0, batch_discount=0.5)}, "EUR")
    report = read(LocalDisk(), tmp_path, Report(["tenant"]))
    found = {line.values[0]: line.total.price for line in report.lines(prices)}
    # Of tenant a: 3 tokens, and 7 of a batch at half the price; the model n has none.
    assert found == {"a": 6.5, "b": 5.0}


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
        part = call.part()
        part.begin(FakeSequence(Tokens(output=5)))
        if ends:
            part.end()
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


def test_every_column_is_one_of_a_row() -> None:
    assert all(name == "day" or name in Row.__struct_fields__ for name in BY)
