"""Sums over the files of a ledger."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from serve_app.ledger.disk import LocalDisk
from serve_app.ledger.prices import Prices
from serve_app.ledger.reading import read
from serve_app.ledger.report import BY, Report
from serve_app.ledger.rows import Row
from serve_app.settings.usage import PriceSettings
from tests.serve_app.ledger.ledgers import ROWS, START, lines, save


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


def test_every_column_is_one_of_a_row() -> None:
    assert all(name == "day" or name in Row.__struct_fields__ for name in BY)
