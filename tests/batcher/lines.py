"""The lines of the batcher that run: a measure of its work that doesn't depend on the machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import batcher

ROOM = str(Path(batcher.__file__).parent)


class Lines:
    """A count of lines; a line of a loop counts as often as it runs."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Count an event of Python's; see `sys.settrace`."""
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        self.count += event == "line"
        return self.trace


@contextmanager
def count_lines() -> Iterator[Lines]:
    """Count the lines of the batcher that this thread runs."""
    lines = Lines()
    before = sys.gettrace()
    sys.settrace(lines.trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
