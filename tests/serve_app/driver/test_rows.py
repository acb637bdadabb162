"""Readers of the formats."""

import csv
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.driver.errors import InputError, RowError
from serve_app.driver.raw_input import CorruptError
from serve_app.driver.rows import Row, numbered, read_csv, read_jsonl, read_parquet


def test_lines_of_json_are_counted_in_bytes() -> None:
    counts: list[float] = []
    text = b'{"id": 1}\n\n{"id": 2}'
    assert list(read_jsonl(io.BytesIO(text), "a.jsonl", counts.append)) == [{"id": 1}, {"id": 2}]
    assert sum(counts) == len(text)


@pytest.mark.parametrize(
    ("line", "message"), [(b"{", "line 2: not valid JSON"), (b"[1]", "line 2: must be a JSON object")]
)
def test_a_bad_line_is_the_error_of_one_row(line: bytes, message: str) -> None:
    stream = io.BytesIO(b'{"id": 1}\n' + line + b'\n{"id": 3}\n')
    first, error, last = read_jsonl(stream, "a.jsonl", lambda count: None)
    assert (first, last) == ({"id": 1}, {"id": 3})
    assert isinstance(error, RowError)
    assert message in error.message


def test_values_of_csv_are_text_and_may_span_lines() -> None:
    stream = io.BytesIO('\ufeffid,prompt\n1,"a\nb"\n2,\n'.encode())
    assert list(read_csv(stream, "a.csv", lambda count: None)) == [
        {"id": "1", "prompt": "a\nb"},
        {"id": "2", "prompt": ""},
    ]


def csv_rows(text: str) -> list[Any]:
    return list(read_csv(io.BytesIO(text.encode()), "a.csv", lambda count: None))


def errors_by_row(found: list[Any]) -> dict[int, str]:
    return {number: row.message for number, row in enumerate(found) if isinstance(row, RowError)}


def test_a_stray_quote_takes_no_other_rows_with_it() -> None:
    lines = [f"{number},word {number}" for number in range(1000)]
    lines[3] = '3,"5 inch'
    found = csv_rows("id,prompt\n" + "\n".join(lines))
    assert len(found) == 1000
    assert errors_by_row(found) == {3: "a.csv, line 5: unexpected end of data"}
    assert found[999] == {"id": "999", "prompt": "word 999"}


def test_a_stray_quote_before_quoted_rows() -> None:
    found = csv_rows('id,prompt\n0,"a\n1,"b"\n2,"c\nd"\n3,"e"f\n4,g\n')
    assert errors_by_row(found) == {
        0: "a.csv, line 2: ',' expected after '\"'",
        3: "a.csv, line 6: ',' expected after '\"'",
    }
    assert [row for row in found if isinstance(row, dict)] == [
        {"id": "1", "prompt": "b"},
        {"id": "2", "prompt": "c\nd"},
        {"id": "4", "prompt": "g"},
    ]


def test_a_field_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.driver.rows.MAX_FIELD", 100)
    found = csv_rows('id,prompt\n0,"a\n' + "1,b\n" * 100)
    assert len(found) == 101
    assert "field larger than field limit (100)" in errors_by_row(found)[0]


def test_a_wrong_number_of_columns_is_an_error_of_its_row() -> None:
    found = csv_rows("id,prompt\n1\n2,b\n3,c,d\n\n4,e\n")
    assert errors_by_row(found) == {
        0: "a.csv, line 2: 1, fewer values than the 2 columns of the header",
        2: "a.csv, line 4: 3, more values than the 2 columns of the header",
    }
    assert found[3] == {"id": "4", "prompt": "e"}


@pytest.mark.parametrize("text", ['id,"prompt\n1,a\n', "id,\udcff\n1,a\n"])
def test_a_header_that_can_not_be_read_ends_the_file(text: str) -> None:
    content = text.encode(errors="surrogateescape")
    with pytest.raises(CorruptError, match=r"a\.csv, line 1: "):
        list(read_csv(io.BytesIO(content), "a.csv", lambda count: None))


@given(st.lists(st.lists(st.text(alphabet='a",\n\r ä', max_size=6), min_size=2, max_size=2), max_size=20))
def test_csv_that_a_library_has_written_is_read_as_it_was(table: list[list[str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["id", "prompt"], *table])
    assert csv_rows(text.getvalue()) == [dict(zip(("id", "prompt"), row, strict=True)) for row in table]


def test_parquet_advances_to_the_size_of_the_file() -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2, 3]}), buffer)
    counts: list[float] = []
    source = pa.BufferReader(buffer.getvalue())
    assert list(read_parquet(source, "a.parquet", counts.append, 300)) == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert sum(counts) == pytest.approx(300)
    with pytest.raises(InputError, match="not a readable Parquet file"):
        list(read_parquet(pa.BufferReader(b"x"), "a.parquet", counts.append, 1))


def test_rows_are_numbered_from_0() -> None:
    error = RowError("invalid_row", "no")
    assert list(numbered([{"id": 1}, error])) == [Row(0, {"id": 1}), Row(1, error)]
