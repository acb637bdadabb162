"""Readers of the formats."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serve_app.driver.errors import InputError, RowError
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
