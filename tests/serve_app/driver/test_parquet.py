"""Parquet files from JSON lines."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pydantic_core import to_json

from serve_app.driver.chunks import Item
from serve_app.driver.parquet import GROUP_ROWS, result_columns, write_parquet

DETAIL = {"finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 1}


def lines(count: int) -> Iterator[bytes]:
    return (to_json(Item(number, number, "").done("x", DETAIL, 1)) for number in range(count))


def test_rows_are_written_in_groups_with_a_fixed_schema(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write_parquet(path, lines(GROUP_ROWS + 1))
    assert pq.ParquetFile(path).num_row_groups == 2
    table = pq.read_table(path)
    assert table.schema.names == ["row", "id", *(name for name, _ in result_columns())]
    assert table.column("row").to_pylist() == list(range(GROUP_ROWS + 1))
    assert [file.name for file in tmp_path.iterdir()] == ["out.parquet"]


@pytest.mark.parametrize(("id", "text"), [("r1", "r1"), (1, "1"), (1.5, "1.5")])
def test_an_id_is_text(tmp_path: Path, id: object, text: str) -> None:
    path = tmp_path / "out.parquet"
    write_parquet(path, iter([to_json(Item(0, id, "").failed("invalid_row", "no", 0))]))
    (row,) = pq.read_table(path).to_pylist()
    assert row["id"] == text
    assert row["error"] == {"type": "invalid_row", "message": "no"}
    assert row["result"] is None


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield from lines(1)
        raise OSError("no space left")

    path = tmp_path / "out.parquet"
    write_parquet(path, lines(2))
    with pytest.raises(Exception, match="no space left"):
        write_parquet(path, broken())
    assert pq.read_table(path).num_rows == 2
