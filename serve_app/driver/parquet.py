"""Conversion of a finished journal into a Parquet file."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.driver.journal import drafted

GROUP_ROWS = 5_000
"""Rows in a row group, which is held in memory."""


def write_parquet(path: Path, lines: Iterator[bytes]) -> None:
    """Write rows to a Parquet file, atomically.

    Args:
        path: The file.
        lines: The rows as JSON, in their final order.

    Raises:
        OutputError: The file can't be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("row", pa.int64()), ("id", pa.string()), *result_columns()])
    with drafted(path) as draft, pq.ParquetWriter(draft, schema) as writer:
        while group := [_flat(from_json(line)) for line in islice(lines, GROUP_ROWS)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def result_columns() -> list[tuple[str, Any]]:
    """Return names and Arrow types of a result's columns."""
    import pyarrow as pa

    return [
        ("result", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("attempts", pa.int64()),
        ("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
    ]


def _flat(row: JSON) -> JSON:
    """Return a row with its id as text, since a column has one type."""
    if not isinstance(row["id"], str):
        row["id"] = to_json(row["id"]).decode()
    return row
