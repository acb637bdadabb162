"""Questions to the files of a ledger."""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from serve_app.ledger.prices import Prices
from serve_app.ledger.report import BY, LedgerError, LedgerFiles
from serve_app.ledger.rows import LedgerRow, encode
from serve_app.settings.usage import PriceSettings
from tests.serve_app.ledger.ledgers import ROWS, START, lines, save

DAY = "2027-01-15"


@pytest.mark.parametrize("parquet", [False, True])
def test_rows_are_summed_by_the_columns_that_are_asked_for(tmp_path: Path, parquet: bool) -> None:
    save(tmp_path, DAY, "a.00000", ROWS, parquet=parquet)
    found = lines(tmp_path, "tenant")
    assert [line.values for line in found] == [("b",), ("a",)]
    total = found[1].total
    assert (total.calls, total.prompt_tokens, total.cached_tokens, total.output_tokens) == (3, 11, 4, 11)
    assert (total.engine_s, found[0].total.wait_s, total.price) == (0.5, 0.25, None)
    pairs = {line.values: line.total.output_tokens for line in lines(tmp_path, "tenant", "model")}
    assert pairs == {("a", "m"): 10, ("b", "m"): 5, ("a", "n"): 1}
    assert [line.values for line in lines(tmp_path, "day")] == [(DAY,)]
    assert {line.values[0] for line in lines(tmp_path, "outcome")} == {"ok", "cancelled"}


@pytest.mark.parametrize("parquet", [False, True])
def test_only_calls_of_the_wanted_time_count(tmp_path: Path, parquet: bool) -> None:
    save(tmp_path, DAY, "a.00000", ROWS, parquet=parquet)
    later = datetime.fromtimestamp(START + 60, UTC)
    assert sum(line.total.calls for line in lines(tmp_path, "key", since=later)) == 1
    assert sum(line.total.calls for line in lines(tmp_path, "key", until=later)) == 3
    assert lines(tmp_path, "key", since=datetime(2027, 1, 16, tzinfo=UTC)) == []


def test_segments_of_both_forms_count_together_and_one_of_both_once(tmp_path: Path) -> None:
    save(tmp_path, DAY, "a.00000", ROWS, parquet=True)
    save(tmp_path, DAY, "a.00000", ROWS, parquet=False)
    save(tmp_path, DAY, "b.00000", ROWS[:1], parquet=False)
    assert sum(line.total.calls for line in lines(tmp_path, "tenant")) == 5


def test_the_price_is_that_of_each_call_and_exact(tmp_path: Path) -> None:
    save(tmp_path, DAY, "a.00000", ROWS, parquet=True)
    prices = Prices({"m": PriceSettings(input=0.1, output=0.2, batch_discount=0.5)}, "EUR")
    found = {line.values[0]: line.total.price for line in lines(tmp_path, "tenant", prices=prices)}
    # Of tenant a: 10 tokens in and 3 out, and 7 out of a batch at half the price; the model n has none.
    assert found == {"a": Decimal("0.0000023"), "b": Decimal("0.000011")}


def test_every_column_is_one_of_a_row() -> None:
    assert all(name == "day" or name in LedgerRow.__struct_fields__ for name in BY)


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    save(tmp_path, DAY, "a.00000", ROWS, parquet=True)
    line = encode(ROWS[0])
    (tmp_path / f"day={DAY}" / "b.00000.jsonl").write_bytes(line + b"what\n" + line + b'{"call": "x", "ti')
    files = LedgerFiles(str(tmp_path))
    for since in (None, datetime.fromtimestamp(START, UTC)):
        assert sum(found.total.calls for found in files.sums(["tenant"], since=since)) == 6
        # A kill has left a part of the last line.
        assert files.wrong == 2


def test_a_row_of_a_later_version_can_be_read(tmp_path: Path) -> None:
    (tmp_path / f"day={DAY}").mkdir()
    line = encode(ROWS[0]).replace(b"{", b'{"new":1,', 1)
    (tmp_path / f"day={DAY}" / "b.00000.jsonl").write_bytes(line)
    assert [found.total.prompt_tokens for found in lines(tmp_path, "tenant")] == [10]


def test_other_files_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, DAY, "a.00000", ROWS, parquet=False)
    (tmp_path / f"day={DAY}" / "a.00001.parquet.draft").write_bytes(b"PAR")
    (tmp_path / "prices.json").write_text("{}")
    assert sum(line.total.calls for line in lines(tmp_path, "tenant")) == 4


def test_an_empty_ledger_has_no_lines(tmp_path: Path) -> None:
    assert lines(tmp_path, "tenant", "day") == []


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / f"day={DAY}" / "a.00000.parquet"
    path.parent.mkdir()
    path.write_bytes(b"no parquet, and longer than its smallest file")
    with pytest.raises(LedgerError, match=r"a\.00000\.parquet"):
        lines(tmp_path, "tenant")


@pytest.mark.parametrize("place", ["/no folder", "~no user/usage"])
def test_a_folder_that_is_not_there_is_named(place: str) -> None:
    with pytest.raises(LedgerError, match=f"{place}: there is no such folder"):
        LedgerFiles(place)


def test_a_ledger_at_a_url_is_asked_there() -> None:
    url, files = f"memory://{uuid4().hex}", fsspec.filesystem("memory")
    files.pipe_file(f"{url}/day={DAY}/a.00000.jsonl", b"".join(map(encode, ROWS)))
    found = LedgerFiles(url).sums(["tenant"])
    assert {line.values[0]: line.total.calls for line in found} == {"a": 3, "b": 1}


class Moving(LedgerFiles):
    """Files of which one becomes Parquet after it is listed."""

    moves = True

    def _segments(self, *bounds: Any) -> Any:
        found = super()._segments(*bounds)
        if self.moves:
            self.moves = False
            for path in found:
                Path(path).unlink()
            save(Path(self._place), DAY, "a.00000", ROWS, parquet=True)
        return found


def test_a_segment_that_becomes_parquet_meanwhile_counts_once(tmp_path: Path) -> None:
    save(tmp_path, DAY, "a.00000", ROWS, parquet=False)
    assert sum(line.total.calls for line in Moving(str(tmp_path)).sums(["tenant"])) == 4


def test_a_ledger_without_prices_has_none(tmp_path: Path) -> None:
    assert LedgerFiles(str(tmp_path)).prices is None
    (tmp_path / "prices.json").write_text("{}")
    assert LedgerFiles(str(tmp_path)).prices is None
