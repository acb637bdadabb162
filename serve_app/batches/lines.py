"""Lines of an input file, read one after the other, so that its size doesn't matter."""

from collections.abc import Iterator
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


def read_lines(path: Input, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines of a file that aren't blank. The file is opened once, and read once.

    Args:
        path: The file.
        max_line_bytes: Bytes beyond which a line isn't kept.

    Raises:
        ContentLostError: The file is gone.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise ContentLostError(f"the content of {path.name} is gone") from None
    with file:
        number = offset = 0
        while True:
            text, whole = _read_line(file, max_line_bytes)
            if not text:
                return
            number += 1
            size = len(text)
            if number == 1:
                text = text.removeprefix(BOM)
            text = text.lstrip()
            start = offset + size - len(text)
            if (text := text.rstrip()) or not whole:
                yield Line(number, text if whole else None, start)
            offset = file.tell()


def _read_line(file: IO[bytes], most: int) -> tuple[bytes, bool]:
    """Return a line, empty at the end of the file, and whether it is a whole one."""
    text = file.readline(most + 1)
    if len(text) <= most or text.endswith(b"\n"):
        return text, True
    while (rest := file.readline(most + 1)) and not rest.endswith(b"\n"):
        pass
    return text, False
