"""Rows of JSON, CSV and Parquet, read as a stream.

An invalid row becomes a `RowError` in its place, with its file and line. Content that is broken from some
place on raises a `CorruptError` there; content of a wrong form raises a `FormError`.
"""

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import CommandError, InputError, RowError
from serve_app.ingress.body import BOM

SEPARATORS = {"csv": ",", "tsv": "\t"}

MAGIC = {
    b"\x1f\x8b": "compressed with gzip: end its name in .gz",
    b"BZh": "compressed with bzip2: end its name in .bz2",
    b"\xfd7zXZ": "compressed with xz: end its name in .xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: end its name in .zst",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "Parquet: end its name in .parquet, or say --input-format parquet",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
}
"""First bytes of content that isn't UTF-8 text, and the remedy."""

BLOCK = 1 << 20

MAX_ROW = 64 << 20
"""Most bytes of one row of JSON."""

MAX_FIELD = 16 << 20
"""Most characters of a field, and of a line, of CSV."""

BATCH_ROWS = 1_000
"""Rows of a Parquet file that are decoded at a time."""

Advance = Callable[[float], None]
"""Takes a number of input bytes that were read."""

Values = Iterator[JSON | RowError]


class CorruptError(CommandError, InputError):
    """The content of a file is broken from some place on; another read would fail in the same way."""


class FormError(CorruptError):
    """A file as a whole doesn't have the form of a dataset; the message says what to change."""


@dataclass(slots=True, frozen=True)
class InputRow:
    """One row of the input.

    Attributes:
        number: Position in the whole input, from 0.
        values: The columns, or the error of an unreadable row.
    """

    number: int
    values: JSON | RowError


def numbered(values: Iterable[JSON | RowError]) -> Iterator[InputRow]:
    """Number rows, from 0."""
    return (InputRow(number, row) for number, row in enumerate(values))


def read_text(
    stream: io.BufferedReader, name: str, format: str, separator: str | None, advance: Advance
) -> Values:
    """Read JSON or CSV.

    Args:
        stream: A buffered stream.
        name: Name of the file, for messages.
        format: A value of `FORMATS`, but Parquet.
        separator: Separator of the columns of CSV; None: by the format.
        advance: Takes the bytes that were read.

    Raises:
        FormError: The content is of another form.
    """
    peeked = stream.peek(1)
    for magic, message in MAGIC.items():
        if peeked.startswith(magic):
            raise FormError(f"{name}: this is {message}")
    if format in SEPARATORS:
        yield from read_csv(stream, name, advance, separator, SEPARATORS[format])
        return
    if separator:
        raise FormError(f"{name}: --separator is for CSV, and this is read as JSON")
    if peeked.removeprefix(BOM).lstrip().startswith(b"["):
        yield from _read_array(stream, name, advance)
    else:
        yield from read_jsonl(stream, name, advance)


def read_jsonl(stream: IO[bytes], name: str, advance: Advance) -> Values:
    """Read JSON objects, one a line; empty lines are skipped.

    Raises:
        FormError: The first line begins a JSON value that spans several lines.
    """
    number = 0
    first = True
    while line := stream.readline(MAX_ROW):
        number += 1
        advance(len(line))
        if len(line) == MAX_ROW and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(BLOCK)
                advance(len(line))
            yield RowError("invalid_row", f"{name}, line {number}: longer than {MAX_ROW >> 20} MiB")
            continue
        text = line.removeprefix(BOM) if number == 1 else line
        if text.isspace() or not text:
            continue
        try:
            yield _object(text)
        except ValueError as error:
            more = first and "EOF while parsing" in str(error) and stream.readline(MAX_ROW)
            if more:
                raise FormError(
                    f"{name}, line {number}: a JSON value over several lines; write one object a line, or a "
                    "list of objects"
                ) from None
            yield RowError("invalid_row", f"{name}, line {number}: {error}")
        first = False


def _read_array(stream: io.BufferedReader, name: str, advance: Advance) -> Values:
    """Read a JSON array of objects, element by element.

    Raises:
        CorruptError: The array doesn't end, or something follows it.
    """
    line = 1
    for element in _elements(stream, name, advance):
        text = element.lstrip()
        begins = line + element[: len(element) - len(text)].count(b"\n")
        line += element.count(b"\n")
        try:
            yield _object(text)
        except ValueError as error:
            yield RowError("invalid_row", f"{name}, line {begins}: {error}")


QUOTED = re.compile(rb'["\\]')
STRUCTURE = re.compile(rb'["{}\[\],]')


def _elements(stream: io.BufferedReader, name: str, advance: Advance) -> Iterator[bytes]:
    """Yield the elements of a JSON array as text, cut at the commas outside of strings and inner values."""
    element = bytearray()
    depth = 0
    quoted = ended = False
    skipped = 0
    while block := stream.read1(BLOCK):
        advance(len(block))
        start, at, skipped = 0, skipped, 0
        while not ended and (found := (QUOTED if quoted else STRUCTURE).search(block, at)):
            at = found.end()
            match found[0]:
                case b'"':
                    quoted = not quoted
                case b"\\":
                    at += 1
                    skipped = max(0, at - len(block))
                case b"{" | b"[":
                    depth += 1
                    if depth == 1:
                        start = at
                case b"," if depth == 1:
                    yield bytes(element) + block[start : at - 1]
                    element.clear()
                    start = at
                case b"}" | b"]":
                    depth -= 1
                    if not depth:
                        last = bytes(element) + block[start : at - 1]
                        if last.strip():
                            yield last
                        element.clear()
                        ended, start = True, at
        if ended:
            if block[start:].strip():
                raise CorruptError(f"{name}: there is more text after the end of the array")
            continue
        element += block[start:] if depth else b""
        if len(element) > MAX_ROW:
            raise CorruptError(f"{name}: an element longer than {MAX_ROW >> 20} MiB")
    if not ended:
        raise CorruptError(f"{name}: the array doesn't end")


def _object(text: bytes) -> JSON:
    """Return the object in a text; raise a ValueError that says what is wrong."""
    try:
        values = from_json(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("must be a JSON object")
    return values


def read_csv(
    stream: IO[bytes],
    name: str,
    advance: Advance,
    separator: str | None = None,
    usual: str = ",",
    most: int = MAX_FIELD,
) -> Values:
    """Read CSV with a header; every value is text.

    A record that breaks the rules of quotes is an error of its first line, and reading continues with the
    next line, so that a stray quote costs no other rows.

    Args:
        stream: The file.
        name: Its name, for messages.
        advance: Takes the bytes that were read.
        separator: Separator of the columns; None: `usual`.
        usual: The usual separator.
        most: Most characters of a field.

    Raises:
        FormError: The header can't be read, has a name twice, or has another separator.
    """
    # A field without an end is kept in memory up to this length.
    csv.field_size_limit(most)
    # Bytes that aren't UTF-8 stay recognizable, so that they fail their row and not the run.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _Lines(text, advance, most)
    header: list[str] | None = None
    while True:
        lines.begin()
        try:
            values = next(csv.reader(lines, strict=True, delimiter=separator or usual), None)
        except csv.Error as error:
            if header is None:
                raise FormError(f"{name}, line 1: {error}") from None
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
                raise FormError(f"{where}: the header is not UTF-8")
            yield RowError("invalid_row", f"{where}: not UTF-8")
        elif header is None:
            header = values
            _check_header(header, where, separator, usual)
        elif len(values) != len(header):
            more = "more" if len(values) > len(header) else "fewer"
            message = f"{where}: {len(values)}, {more} values than the {len(header)} columns of the header"
            yield RowError("invalid_row", message)
        else:
            yield dict(zip(header, values, strict=True))


def _check_header(header: list[str], where: str, separator: str | None, usual: str) -> None:
    if len(header) == 1 and separator is None:
        for other in (",", ";", "\t", "|"):
            if other != usual and other in header[0]:
                shown = "'\\t'" if other == "\t" else f"'{other}'"
                raise FormError(
                    f"{where}: one column, {header[0]!r}; if {shown} separates columns, say "
                    f"--separator {shown}"
                )
    _check_names(header, where)


def _check_names(names: list[str], where: str) -> None:
    """Raise a FormError for two columns of one name: the second would silently replace the first."""
    for name in names:
        if (count := names.count(name)) > 1:
            raise FormError(f"{where}: {count} columns have the name {name!r}; rename or drop all but one")


class _Lines:
    """The lines of a text; the lines of the current record can be read again."""

    def __init__(self, text: io.TextIOWrapper, advance: Advance, most: int) -> None:
        self._text = text
        self._advance = advance
        self._most = most
        self._record: list[str] = []
        self._again: deque[str] = deque()
        self._number = 0
        self.first = 1

    def begin(self) -> None:
        """Begin a record."""
        self._record.clear()
        self.first = self._number + 1

    def keep_first(self) -> None:
        """Keep only the first line of the record; the other lines are read again."""
        self._again.extendleft(reversed(self._record[1:]))
        self._number = self.first

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else self._next()
        self._record.append(line)
        self._number += 1
        if len(line) > self._most:
            raise csv.Error(f"longer than {self._most:,} characters")
        return line

    def _next(self) -> str:
        line = rest = self._text.readline(self._most + 1)
        while len(line) > self._most and rest and not rest.endswith(("\n", "\r")):
            # The rest of a line that is too long is dropped.
            self._advance(len(rest))
            rest = self._text.readline(BLOCK)
        if not line:
            raise StopIteration
        self._advance(len(rest))
        return line


def read_parquet(file: Any, name: str, advance: Advance, size: int) -> Values:
    """Read a Parquet file, a batch of rows at a time; columns of bytes are text where they are UTF-8.

    A broken row group yields one error in place of its unreadable rows; the next group is read.

    Args:
        file: A seekable file, of pyarrow or of Python.
        name: Name of the file, for messages.
        advance: Takes the bytes that were read, in proportion to the rows.
        size: Size of the file, in bytes.

    Raises:
        CorruptError: The file isn't a Parquet file, or its end is missing.
        FormError: Two columns have one name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{name}: not a readable Parquet file: {error}") from None
    _check_names(parquet.schema_arrow.names, name)
    total = max(1, parquet.metadata.num_rows)
    begin = 0
    for group in range(parquet.num_row_groups):
        left = parquet.metadata.row_group(group).num_rows
        begin += left
        try:
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                for row in _python(batch, name, begin - left):
                    advance(size / total)
                    left -= 1
                    yield row
        except (pa.ArrowException, OSError) as error:
            yield RowError(
                "unreadable_rows", f"{name}, row group {group}: {left:,} rows can't be read: {error}"
            )
            advance(left * size / total)


def _python(batch: Any, name: str, number: int) -> Values:
    """Return the rows of an Arrow batch; text that isn't UTF-8 fails its row."""
    try:
        rows: list[JSON] = batch.to_pylist()
    except UnicodeDecodeError:
        if len(batch) == 1:
            yield RowError("invalid_row", f"{name}, row {number}: not UTF-8")
            return
        for index in range(len(batch)):
            yield from _python(batch.slice(index, 1), name, number + index)
        return
    binary = [field.name for field in batch.schema if "binary" in str(field.type)]
    for row in rows:
        for column in binary:
            row[column] = _as_text(row[column])
        yield row


def _as_text(value: Any) -> Any:
    """Return a value with text in place of bytes, where they are UTF-8."""
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return value
        case list():
            return [_as_text(item) for item in value]
        case dict():
            return {key: _as_text(item) for key, item in value.items()}
        case _:
            return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
