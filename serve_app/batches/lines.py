"""Lines of an input file, read in slices, so that its size doesn't matter."""

from typing import IO, Literal, NamedTuple, Protocol

from serve_app.batches.errors import ContentLostError
from serve_app.ingress.body import BOM

SLICE_LINES = 128
SLICE_BYTES = 1 << 20


class Input(Protocol):
    """A file that can be read: a path, or an object in a storage."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"]) -> IO[bytes]: ...


class Line(NamedTuple):
    """A line that isn't blank.

    Attributes:
        number: Its number in the file, from 1.
        text: Its text, without the space around it; None: it is longer than allowed.
        offset: The place of the text in the file, in bytes.
    """

    number: int
    text: bytes | None
    offset: int


class Position(NamedTuple):
    """A place in a file: a byte offset, and the number of lines before it."""

    offset: int = 0
    lines: int = 0


def read_slice(
    path: Input,
    start: Position,
    max_line_bytes: int,
    *,
    most_lines: int = SLICE_LINES,
    most_bytes: int = SLICE_BYTES,
) -> tuple[list[Line], Position, bool]:
    """Read some lines.

    Args:
        path: The file.
        start: The place of the first one.
        max_line_bytes: Bytes beyond which a line isn't kept.
        most_lines: Lines to read.
        most_bytes: Bytes after which no more lines are read.

    Returns:
        The lines that aren't blank, the place behind them, and whether the file ends there.

    Raises:
        ContentLostError: The file is gone.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise ContentLostError(f"the content of {path.name} is gone") from None
    lines: list[Line] = []
    number = start.lines
    with file:
        file.seek(start.offset)
        while len(lines) < most_lines and file.tell() - start.offset < most_bytes:
            offset = file.tell()
            text, whole = _read_line(file, max_line_bytes)
            if not text:
                return lines, Position(file.tell(), number), True
            number += 1
            size = len(text)
            if number == 1:
                text = text.removeprefix(BOM)
            text = text.lstrip()
            offset += size - len(text)
            if (text := text.rstrip()) or not whole:
                lines.append(Line(number, text if whole else None, offset))
        return lines, Position(file.tell(), number), False


def _read_line(file: IO[bytes], most: int) -> tuple[bytes, bool]:
    """Return a line, empty at the end of the file, and whether it is a whole one."""
    text = file.readline(most + 1)
    if len(text) <= most or text.endswith(b"\n"):
        return text, True
    while (rest := file.readline(most + 1)) and not rest.endswith(b"\n"):
        pass
    return text, False
