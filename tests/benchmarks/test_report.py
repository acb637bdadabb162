"""Results of benchmarks: rows without samples, and files that keep other benchmarks."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.measuring import Row, Table
from tests.benchmarks.report import RESULTS, as_json, keep, number, show, summary

ROW = Row("ours", "s", [3.0, 1.0, 2.0, 5.0, 4.0], at_most=2.5)
PLAIN = Row("other", "", [1.23456789])


def test_a_summary_has_median_range_quartiles_and_target() -> None:
    assert summary(ROW) == {
        "what": "ours",
        "unit": "s",
        "median": 3.0,
        "low": 1.0,
        "q1": 2.0,
        "q3": 4.0,
        "high": 5.0,
        "rounds": 5,
        "at_most": 2.5,
        "met": False,
    }
    short = summary(PLAIN)
    assert "met" not in short
    assert (short["median"], short["q1"], short["rounds"]) == (1.23457, 1.23457, 1)


def test_a_file_keeps_the_tables_of_other_benchmarks(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    keep(path, {"first": Table('a "setting"', [ROW])}, {"pairs": 5})
    keep(path, {"second": Table("another", [PLAIN])}, {"pairs": 1})
    found = json.loads(path.read_text())
    assert list(found) == ["first", "second"]
    assert found["first"]["setting"] == 'a "setting"'
    assert found["first"]["pairs"] == 5
    assert found["first"]["rows"] == [summary(ROW)]
    assert json.loads(as_json(found)) == found


@pytest.mark.parametrize("path", sorted(RESULTS.glob("[bdps]*.json")), ids=lambda path: path.stem)
def test_the_results_in_the_repository_hold_no_samples(path: Path) -> None:
    text = path.read_text()
    assert as_json(json.loads(text)) == text
    for table in json.loads(text).values():
        assert {"setting", "measured", "machine", "versions"} <= set(table)
        for row in table["rows"]:
            assert row["low"] <= row["q1"] <= row["median"] <= row["q3"] <= row["high"]
            assert "samples" not in row


def test_a_table_as_text() -> None:
    lines = show("burst", Table("of records.", [ROW, PLAIN])).splitlines()
    assert lines[0] == "burst: of records."
    assert lines[3].split() == ["ours", "3.00", "s", "1.00", "to", "5.00", "\u2264", "2.50", "s", "MISSED"]
    assert number(0.01234, "s") == "0.0123 s"
