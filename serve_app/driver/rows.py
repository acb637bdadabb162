"""Rows of the input, and streaming readers of their formats."""

import csv
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.driver.errors import RowError
from serve_app.driver.raw_input import CorruptError

BATCH_ROWS = 1_000
"""Rows of a Parquet file that are decoded at a time."""

MAX_FIELD = 16 << 20
"""Most characters of a field of CSV."""

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
    """Read CSV with a header; every value is text.

    A record that breaks the rules of quotes is an error of its first line, and reading goes on with the next
    line: a stray quote takes no other rows with it.

    Raises:
        CorruptError: The header can't be read.
    """
    # A field that has no end would be kept in memory up to there.
    csv.field_size_limit(MAX_FIELD)
    # Bytes that aren't UTF-8 stay recognizable, so that they fail their row and not the run.
    lines = _Lines(
        io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=""), advance
    )
    header: list[str] | None = None
    while True:
        lines.begin()
        try:
            values = next(csv.reader(lines, strict=True), None)
        except csv.Error as error:
            if header is None:
                raise CorruptError(f"{name}, line 1: {error}") from None
            yield RowError("invalid_row", f"{name}, line {lines.first}: {error}")
            lines.keep_first()
            continue
        if values is None:
            return
        where = f"{name}, line {lines.first}"
        if not values:
            # An empty line.
            continue
        if not all(map(_is_utf8, values)):
            if header is None:
                raise CorruptError(f"{where}: the header is not UTF-8")
            yield RowError("invalid_row", f"{where}: not UTF-8")
        elif header is None:
            header = values
        elif len(values) != len(header):
            more = "more" if len(values) > len(header) else "fewer"
            message = f"{where}: {len(values)}, {more} values than the {len(header)} columns of the header"
            yield RowError("invalid_row", message)
        else:
            yield dict(zip(header, values, strict=True))


class _Lines:
    """The lines of a text; those of the record that is being read can be read again."""

    def __init__(self, text: Iterable[str], advance: Advance) -> None:
        self._lines = iter(text)
        self._advance = advance
        self._record: list[str] = []
        self._again: deque[str] = deque()
        self._number = 0
        self.first = 1

    def begin(self) -> None:
        """Begin a record."""
        self._record.clear()
        self.first = self._number + 1

    def keep_first(self) -> None:
        """Read all lines of the record but its first one again."""
        self._again.extendleft(reversed(self._record[1:]))
        self._number = self.first

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        if self._again:
            line = self._again.popleft()
        else:
            line = next(self._lines)
            self._advance(len(line))
        self._record.append(line)
        self._number += 1
        return line


def read_parquet(file: Any, name: str, advance: Advance, size: int) -> Values:
    """Read a Parquet file, a batch of rows at a time.

    A row group that is broken is one error in place of the rows that can't be read; the next one is read.

    Args:
        file: A seekable file; pyarrow's, or one of Python's.
        name: Name of the file, for messages.
        advance: Takes the bytes that were read, in proportion to the rows.
        size: Size of the file, in bytes.

    Raises:
        CorruptError: The file is no Parquet file, or its end is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{name}: not a readable Parquet file: {error}") from None
    total = max(1, parquet.metadata.num_rows)
    for group in range(parquet.num_row_groups):
        left = parquet.metadata.row_group(group).num_rows
        try:
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                for row in _python(batch, name):
                    advance(size / total)
                    left -= 1
                    yield row
        except (pa.ArrowException, OSError) as error:
            yield RowError(
                "unreadable_rows", f"{name}, row group {group}: {left:,} rows can't be read: {error}"
            )
            advance(left * size / total)


def _python(batch: Any, name: str) -> Values:
    """Return the rows of an Arrow batch; text that isn't UTF-8 fails its row."""
    try:
        rows: list[JSON] = batch.to_pylist()
    except UnicodeDecodeError:
        if len(batch) == 1:
            yield RowError("invalid_row", f"{name}: not UTF-8")
            return
        for index in range(len(batch)):
            yield from _python(batch.slice(index, 1), name)
        return
    yield from rows


def numbered(values: Iterable[JSON | RowError]) -> Iterator[Row]:
    """Number rows, from 0."""
    return (Row(number, row) for number, row in enumerate(values))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
