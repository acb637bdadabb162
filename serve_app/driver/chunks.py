"""Chunks: the rows of one call."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import CommandError, MissingColumnError, RowError
from serve_app.dataset.formats import Row
from serve_app.dataset.prompts import Prompt, Prompter
from serve_app.driver.spans import Spans

UNREADABLE = {"invalid_row", "unreadable_rows"}
"""Errors of rows that say nothing about their columns."""


@dataclass(slots=True, frozen=True)
class Item:
    """One row to send.

    Attributes:
        number: Position in the input, from 0.
        id: The row's id for its user.
        prompt: The prompt, or the error of a row without one.
    """

    number: int
    id: Any
    prompt: Prompt | RowError

    def done(self, result: str, detail: JSON, attempts: int) -> JSON:
        """Return the output row of a result."""
        return {
            "row": self.number,
            "id": self.id,
            "result": result,
            "finish_reason": detail["finish_reason"],
            "prompt_tokens": detail["prompt_tokens"],
            "completion_tokens": detail["completion_tokens"],
            "attempts": attempts,
            "error": None,
        }

    def failed(self, type: str, message: str, attempts: int) -> JSON:
        """Return the output row of an error."""
        return {
            "row": self.number,
            "id": self.id,
            "result": None,
            "finish_reason": None,
            "prompt_tokens": None,
            "completion_tokens": None,
            "attempts": attempts,
            "error": {"type": type, "message": message},
        }


Chunk = Sequence[Item]


def chunked(
    rows: Iterable[Row],
    prompter: Prompter,
    size: int,
    *,
    done: Spans | None = None,
    id_column: str = "id",
    limit: int | None = None,
) -> Iterator[Chunk]:
    """Cut rows into chunks.

    Args:
        rows: The input.
        prompter: Makes prompts of them.
        size: Rows in a chunk.
        done: Rows to skip.
        id_column: Column of the id; a row without one gets its number.
        limit: Number of input rows to take, from the beginning.

    Raises:
        CommandError: No row of the first chunk has a column that the prompt needs.
    """
    chunk: list[Item] = []
    first = True
    for row in islice(rows, limit):
        if done and row.number in done:
            # A chunk is contiguous, so that the rows that are done form few spans.
            if chunk:
                yield chunk
                chunk = []
            continue
        chunk.append(_item(row, prompter, id_column))
        if len(chunk) == size:
            if first and not done:
                _check_columns(chunk)
            first = False
            yield chunk
            chunk = []
    if chunk:
        if first and not done:
            _check_columns(chunk)
        yield chunk


def _item(row: Row, prompter: Prompter, id_column: str) -> Item:
    if isinstance(row.values, RowError):
        return Item(row.number, row.number, row.values)
    id = row.values.get(id_column, row.number)
    if id is None or (isinstance(id, float) and not isfinite(id)):
        # NaN stands for a missing value in many tools, and is no JSON.
        id = row.number
    elif not isinstance(id, str | int | float):
        id = str(id)
    try:
        return Item(row.number, id, prompter.prompt(row.values))
    except RowError as error:
        return Item(row.number, id, error)


def _check_columns(chunk: Chunk) -> None:
    """Raise if all rows of a chunk that can be read lack a column: then its name is wrong, not the rows."""
    missing = None
    for item in chunk:
        if isinstance(item.prompt, MissingColumnError):
            missing = missing or item.prompt
        elif not (isinstance(item.prompt, RowError) and item.prompt.type in UNREADABLE):
            return
    if missing:
        raise CommandError(f"the first rows fail: {missing.message}. {missing.fix}")
