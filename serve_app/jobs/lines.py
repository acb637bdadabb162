"""Lines of a batch: the body of an input line as it is sent, and lines of the output and the error file."""

import msgspec
from pydantic_core import to_json

from serve_app.api.protocol import JSON
from serve_app.rows.rows import Result, Row, tokens_of

EXPIRED = ("batch_expired", "This request could not be executed before the completion window ended.")
CANCELLED = ("batch_cancelled", "The batch was cancelled before this request was executed.")


class _Line(msgspec.Struct):
    """The parts of an input line that are needed when its row is sent, and for its result."""

    custom_id: str
    body: msgspec.Raw


_LINE = msgspec.json.Decoder(_Line)


def body_of(row: Row) -> bytes:
    """Return the body of a row, in the tier of batches."""
    fields = bytes(_LINE.decode(row.text).body)[:-1].rstrip()
    # Of two fields with one name, the last counts.
    return fields + (b"" if fields == b"{" else b",") + b'"service_tier":"flex"}'


def answered(batch: str, row: Row, status: int, body: JSON) -> Result:
    """Return the result of a row that the engine answered, or refused."""
    id = _id(batch, row)
    response = {"status_code": status, "request_id": id, "body": body}
    text = _line(id, row, response, None)
    return Result(row.line, text, not 200 <= status < 300, tokens=tokens_of(body))


def unrun(batch: str, row: Row, reason: tuple[str, str]) -> Result:
    """Return the result of a row that was not run, since its batch expired or was cancelled."""
    error = {"code": reason[0], "message": reason[1]}
    return Result(row.line, _line(_id(batch, row), row, None, error), True, True)


def _id(batch: str, row: Row) -> str:
    # The id is the same in each try, so that a row's calls can be found together.
    return f"batch_req_{batch.removeprefix('batch_')}_{row.line}"


def _line(id: str, row: Row, response: JSON | None, error: JSON | None) -> bytes:
    custom_id = _LINE.decode(row.text).custom_id
    return to_json({"id": id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
