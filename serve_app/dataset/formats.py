"""Rows of JSON, CSV and Parquet, read as a stream.

The readers are strict: the first row that can't be read raises a `CorruptError` with its file and line.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import CommandError, InputError
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
"""Most bytes of a line of JSON."""

MAX_ARRAY = 256 << 20
"""Most bytes of a JSON array, which is read as a whole."""

MAX_FIELD = 16 << 20
"""Most characters of a field, and of a line, of CSV."""

BATCH_ROWS = 1_000
"""Rows of a Parquet file that are decoded at a time."""

Advance = Callable[[float], None]
"""Takes a number of input bytes that were read."""

Values = Iterator[JSON]


class CorruptError(CommandError, InputError):
    """A file is broken, or doesn't have the form of a dataset; another read would fail in the same way."""


@dataclass(slots=True, frozen=True)
class InputRow:
    """One row of the input.

    Attributes:
        number: Position in the whole input, from 0; or the number that the output gave the row.
        values: The columns.
    """

    number: int
    values: JSON


def numbered(values: Iterable[JSON]) -> Iterator[InputRow]:
    """Number rows, from 0."""
    return (InputRow(number, row) for number, row in enumerate(values))


def read_text(
    stream: io.BufferedReader, name: str, format: str, separator: str | None, advance: Advance
) -> Values:
    """Read JSON or CSV.

    Args:
        stream: A buffered stream.
        name: Name of the file, for messages.
        format: A value of `FORMATS` other than Parquet.
        separator: Separator of the columns of CSV; None: by the format.
        advance: Takes the bytes that were read.

    Raises:
        CorruptError: The content is of another form.
    """
    peeked = stream.peek(1)
    for magic, message in MAGIC.items():
        if peeked.startswith(magic):
            raise CorruptError(f"{name}: this is {message}")
    if format in SEPARATORS:
        yield from read_csv(stream, name, advance, separator, SEPARATORS[format])
        return
    if separator:
        raise CorruptError(f"{name}: --separator is for CSV, and this is read as JSON")
    if peeked.removeprefix(BOM).lstrip().startswith(b"["):
        yield from _read_array(stream, name, advance)
    else:
        yield from read_jsonl(stream, name, advance)


def read_jsonl(stream: IO[bytes], name: str, advance: Advance) -> Values:
    """Read JSON objects, one a line; empty lines are skipped.

    Args:
        stream: The file.
        name: Its name, for messages.
        advance: Takes the bytes that were read.

    Raises:
        CorruptError: A line is no JSON object, or is too long.
    """
    number, first = 0, True
    while line := stream.readline(MAX_ROW + 1):
        number += 1
        advance(len(line))
        where = f"{name}, line {number}"
        if len(line) > MAX_ROW:
            raise CorruptError(f"{where}: longer than {MAX_ROW:,} bytes")
        text = line.removeprefix(BOM) if number == 1 else line
        if text.isspace() or not text:
            continue
        try:
            yield _object(text)
        except ValueError as error:
            if first and "EOF while parsing" in str(error) and stream.read(1):
                error = ValueError(
                    "a JSON value over several lines; write one object a line, or a list of objects"
                )
            raise CorruptError(f"{where}: {error}") from None
        first = False


def _read_array(stream: io.BufferedReader, name: str, advance: Advance) -> Values:
    """Read a JSON array of objects.

    Raises:
        CorruptError: The text is no array of objects, or is too long.
    """
    text = stream.read(MAX_ARRAY + 1)
    advance(len(text))
    if len(text) > MAX_ARRAY:
        raise CorruptError(f"{name}: a JSON array of more than {MAX_ARRAY:,} bytes; write one object a line")
    try:
        elements = from_json(text.removeprefix(BOM))
    except ValueError as error:
        raise CorruptError(f"{name}: not valid JSON: {error}") from None
    for number, element in enumerate(elements, 1):
        if not isinstance(element, dict):
            raise CorruptError(f"{name}, element {number}: must be a JSON object")
        yield element


def _object(text: bytes) -> JSON:
    """Return the object in a text; raise a ValueError with the reason if there is none."""
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
) -> Values:
    """Read CSV with a header; every value is text.

    Args:
        stream: The file.
        name: Its name, for messages.
        advance: Takes the bytes that were read.
        separator: Separator of the columns; None: `usual`.
        usual: The usual separator.

    Raises:
        CorruptError: A record breaks the rules of quotes, isn't UTF-8, or has another number of values than
            the header. The header has a name twice, or another separator.
    """
    # A field without an end is kept in memory up to this length.
    csv.field_size_limit(MAX_FIELD)
    reader = csv.reader(_lines(stream, name, advance), strict=True, delimiter=separator or usual)
    header: list[str] | None = None
    while True:
        where = f"{name}, line {reader.line_num + 1}"
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise CorruptError(f"{where}: {error}") from None
        if values is None:
            return
        if not values:
            # An empty line.
            continue
        if header is None:
            header = values
            _check_header(header, where, separator, usual)
        elif len(values) != len(header):
            more = "more" if len(values) > len(header) else "fewer"
            raise CorruptError(
                f"{where}: {len(values)}, {more} values than the {len(header)} columns of the header"
            )
        else:
            yield dict(zip(header, values, strict=True))


def _lines(stream: IO[bytes], name: str, advance: Advance) -> Iterator[str]:
    # Blocks are decoded with surrogates, so that the line that isn't UTF-8 can be named.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    number = 0
    while line := text.readline(MAX_FIELD + 1):
        number += 1
        if len(line) > MAX_FIELD:
            raise CorruptError(f"{name}, line {number}: longer than {MAX_FIELD:,} characters")
        try:
            advance(len(line.encode()))
        except UnicodeEncodeError:
            raise CorruptError(f"{name}, line {number}: not UTF-8") from None
        yield line


def _check_header(header: list[str], where: str, separator: str | None, usual: str) -> None:
    if len(header) == 1 and separator is None:
        for other in (",", ";", "\t", "|"):
            if other != usual and other in header[0]:
                shown = "'\\t'" if other == "\t" else f"'{other}'"
                raise CorruptError(
                    f"{where}: one column, {header[0]!r}; if {shown} separates columns, say "
                    f"--separator {shown}"
                )
    _check_names(header, where)


def _check_names(names: list[str], where: str) -> None:
    """Raise a CorruptError for two columns of one name: the second would silently replace the first."""
    for name in names:
        if (count := names.count(name)) > 1:
            raise CorruptError(f"{where}: {count} columns have the name {name!r}; rename or drop all but one")


def read_parquet(file: Any, name: str, advance: Advance, size: int) -> Values:
    """Read a Parquet file, a batch of rows at a time; columns of bytes are text where they are UTF-8.

    Args:
        file: A seekable file, of pyarrow or of Python.
        name: Name of the file, for messages.
        advance: Takes the bytes that were read, in proportion to the rows.
        size: Size of the file, in bytes.

    Raises:
        CorruptError: The file isn't a Parquet file, or a part of it is broken. Two columns have one name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{name}: not a readable Parquet file: {error}") from None
    _check_names(parquet.schema_arrow.names, name)
    binary = [field.name for field in parquet.schema_arrow if "binary" in str(field.type)]
    total = max(1, parquet.metadata.num_rows)
    number = 0
    try:
        for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
            for row in batch.to_pylist():
                for column in binary:
                    row[column] = _as_text(row[column])
                advance(size / total)
                number += 1
                yield row
    except UnicodeDecodeError:
        last = min(total, number + BATCH_ROWS)
        raise CorruptError(f"{name}, rows {number + 1:,} to {last:,}: a text is not UTF-8") from None
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{name}, after row {number:,}: {error}") from None


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
