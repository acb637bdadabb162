"""Rows of the input, and streaming readers of their formats."""

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.driver.errors import InputError, RowError

BATCH_ROWS = 1_000
"""Rows of a Parquet file that are decoded at a time."""

Advance = Callable[[float], None]
"""Takes a number of input bytes that were read."""


@dataclass(slots=True, frozen=True)
class Row:
    """One row of the input.

    Attributes:
        number: Position in the whole input, from 0.
        values: The columns, or the error of an unreadable row.
    """

    number: int
    values: JSON | RowError


Values = Iterator[JSON | RowError]


def read_jsonl(stream: IO[bytes], name: str, advance: Advance) -> Values:
    """Read JSON objects, one a line; empty lines are skipped."""
    for number, line in enumerate(stream, 1):
        advance(len(line))
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.isspace():
            continue
        try:
            values = from_json(text)
        except ValueError as error:
            yield RowError("invalid_row", f"{name}, line {number}: not valid JSON: {error}")
            continue
        if not isinstance(values, dict):
            yield RowError("invalid_row", f"{name}, line {number}: must be a JSON object")
            continue
        yield values


def read_csv(stream: IO[bytes], name: str, advance: Advance) -> Values:
    """Read CSV with a header; every value is text."""
    csv.field_size_limit(sys.maxsize)
    # Bytes that aren't UTF-8 stay recognizable, so that they fail their row and not the run.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.DictReader(_counted(text, advance))
    for values in reader:
        where = f"{name}, line {reader.line_num}"
        columns = len(reader.fieldnames or ())
        if None in values:
            yield RowError("invalid_row", f"{where}: more values than the {columns} columns of the header")
        elif not all(value is None or _is_utf8(value) for value in values.values()):
            yield RowError("invalid_row", f"{where}: not UTF-8")
        else:
            yield dict(values)


def read_parquet(file: Any, name: str, advance: Advance, size: int) -> Values:
    """Read a Parquet file, a batch of rows at a time.

    Args:
        file: A seekable `pyarrow.NativeFile`.
        name: Name of the file, for messages.
        advance: Takes the bytes that were read, in proportion to the rows.
        size: Size of the file, in bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file, pre_buffer=False)
        total = max(1, parquet.metadata.num_rows)
        for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
            rows: list[JSON] = batch.to_pylist()
            for row in rows:
                advance(size / total)
                yield row
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name}: not a readable Parquet file: {error}") from None


def numbered(values: Iterable[JSON | RowError]) -> Iterator[Row]:
    """Number rows, from 0."""
    return (Row(number, row) for number, row in enumerate(values))


def _counted(lines: Iterable[str], advance: Advance) -> Iterator[str]:
    for line in lines:
        advance(len(line))
        yield line


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
