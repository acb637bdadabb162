"""Rows of a batch: what is sent of an input line, and the lines of the output and the error file."""

from typing import NamedTuple

from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.batches.tokens import NO_TOKENS, Tokens, tokens_of

EXPIRED = ("batch_expired", "This request could not be executed before the completion window ended.")
CANCELLED = ("batch_cancelled", "The batch was cancelled before this request was executed.")


class Row(NamedTuple):
    """A row of the input.

    Attributes:
        line: Number of its line.
        text: The line.
        model: The model that its body names; None: none.
    """

    line: int
    text: bytes
    model: str | None = None

    def body(self) -> JSON:
        """Return the body to send, in the tier of batches."""
        body: JSON = from_json(self.text)["body"]
        return body | {"service_tier": "flex"}


class Result(NamedTuple):
    """The result of a row.

    Attributes:
        line: Number of the input line.
        text: Line of the output or the error file.
        is_error: Whether it belongs into the error file.
        is_unrun: Whether the row has no answer: its batch ended before.
        tokens: Tokens that the answer reports.
    """

    line: int
    text: bytes
    is_error: bool
    is_unrun: bool = False
    tokens: Tokens = NO_TOKENS


def answered(batch: str, row: Row, status: int, body: JSON) -> Result:
    """Return the result of a row that the engine answered, or refused."""
    id = _id(batch, row)
    response = {"status_code": status, "request_id": id, "body": body}
    text = _line(id, row, response, None)
    return Result(row.line, text, not 200 <= status < 300, tokens=tokens_of(body))


def unrun(batch: str, row: Row, reason: tuple[str, str]) -> Result:
    """Return the result of a row without an answer: its batch expired or was cancelled before."""
    error = {"code": reason[0], "message": reason[1]}
    return Result(row.line, _line(_id(batch, row), row, None, error), True, True)


def _id(batch: str, row: Row) -> str:
    # The same in each try, so that a row's calls can be found together.
    return f"batch_req_{batch.removeprefix('batch_')}_{row.line}"


def _line(id: str, row: Row, response: JSON | None, error: JSON | None) -> bytes:
    custom_id = from_json(row.text)["custom_id"]
    return to_json({"id": id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
