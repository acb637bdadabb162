"""Intake of rows: the upload of a file, the one parse of its rows, and the checks of a batch."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import IO
from urllib.parse import unquote_to_bytes

from pydantic_core import from_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.jobs.content import Contents, Draft
from serve_app.jobs.plan import InputLine, Planner, RowPlan, Target, read_lines
from serve_app.settings.batches import BatchesSettings

ENCODED_NAME = re.compile(rb";\s*filename\*\s*=\s*utf-8'[^']*'([^;\s]+)", re.IGNORECASE)

FORM_BYTES = 1 << 16
"""Most bytes of a form beside its file."""

STALL_S = 60.0
"""Seconds without a byte after which an upload fails."""


class FileUpload:
    """A form that is being received.

    Args:
        content: Creates the draft for the file.
        max_bytes: Most bytes of the file.

    Attributes:
        fields: The fields beside the file.
        filename: Name of the file.
        draft: Content of the file; None: no file has come yet.
        ended: Whether the form is complete.
    """

    def __init__(self, content: Contents, max_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.draft: Draft | None = None
        self.ended = False
        self._content = content
        self._max_bytes = max_bytes
        self._discarded = False
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._name = ""
        self._value: bytearray | None = None

    def parser(self, boundary: bytes) -> MultipartParser:
        """Return a parser that fills this upload."""
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._part_ends,
                "on_end": self._end,
            },
        )

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return self.draft.size if self.draft else 0

    def check(self, received: int) -> None:
        """Raise a RequestError if the form, without its file, is too large so far."""
        if received - self.size > FORM_BYTES:
            message = f"The form takes more than {FORM_BYTES} bytes beside its file"
            raise RequestError(413, "request_too_large", message)

    def discard(self) -> None:
        """Delete the received file, even if a thread in the parser is still writing it."""
        self._discarded = True
        if self.draft is not None:
            self.draft.discard()

    def _part_begins(self) -> None:
        self._disposition = b""
        self._name = ""
        self._value = None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _header_ends(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _headers_end(self) -> None:
        options = parse_options_header(self._disposition)[1]
        self._name = _text(options.get(b"name", b""))
        if self._name != "file" and b"filename" not in options:
            self._value = bytearray()
            return
        if self._name != "file" or self.draft is not None:
            raise bad_request("The form must have one file, in the field `file`", "file")
        self.filename = _text(options.get(b"filename", b"")) or _encoded_name(self._disposition) or "file"
        self.draft = self._content.draft()
        if self._discarded:
            # The thread of a cancelled call keeps running; `discard` found no draft.
            self.draft.discard()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._value is not None:
            self._value.extend(data[start:end])
        elif self.draft is not None:
            if self.draft.size + end - start > self._max_bytes:
                raise _too_large(self._max_bytes)
            self.draft.write(data[start:end])

    def _part_ends(self) -> None:
        if self._value is not None:
            self.fields[self._name] = _text(bytes(self._value))

    def _end(self) -> None:
        self.ended = True


class PendingUploads:
    """Bytes of the files that are being received, by tenant. The store counts complete files only."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def count(self, tenant: str, max_bytes: int) -> Iterator[Callable[[int], None]]:
        """Count an upload while the context is open.

        Args:
            tenant: Its tenant.
            max_bytes: Most bytes of all uploads of the tenant.

        Yields:
            A function that takes the bytes by which the file has grown. It raises a RequestError beyond
            `max_bytes`.
        """
        own = 0

        def grow(size: int) -> None:
            nonlocal own
            own += size
            self._bytes[tenant] += size
            if self._bytes[tenant] > max_bytes:
                message = f"the uploads of this tenant that are under way have more than {max_bytes} bytes"
                raise bad_request(message, "file")

        try:
            yield grow
        finally:
            self._bytes[tenant] -= own
            if not self._bytes[tenant]:
                del self._bytes[tenant]


async def receive(
    request: Request, content: Contents, max_bytes: int, grow: Callable[[int], None] = lambda size: None
) -> FileUpload:
    """Receive a form.

    Args:
        request: The request.
        content: Creates the draft for the file, which the caller keeps or discards.
        max_bytes: Most bytes of the file.
        grow: Called with the bytes by which the file has grown. An error that this call raises ends the
            upload.

    Raises:
        RequestError: 400, the body isn't a form with a file, or ends early; 408, the upload stalls; 413, the
            form is too large.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        message = "The body must be a form (multipart/form-data) with the fields `purpose` and `file`"
        raise bad_request(message)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes + FORM_BYTES:
        raise _too_large(max_bytes)
    upload = FileUpload(content, max_bytes)
    try:
        parser = upload.parser(boundary)
        received = 0
        async for piece in _pieces(request):
            received += len(piece)
            before = upload.size
            await asyncio.to_thread(parser.write, piece)
            upload.check(received)
            grow(upload.size - before)
        if not upload.ended:
            raise bad_request("The form ends early")
    except FormParserError as error:
        upload.discard()
        raise bad_request(f"The form can't be read: {error}") from None
    except BaseException:
        upload.discard()
        raise
    return upload


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"The upload stalled for {STALL_S:g} s"
            raise RequestError(408, "timeout_error", message) from None
        except ClientDisconnect:
            raise bad_request("The body ended early") from None
        if piece:
            yield piece


def _text(data: bytes) -> str:
    # PostgreSQL stores no NUL.
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def _encoded_name(disposition: bytes) -> str:
    """Return the name in `filename*`, which some clients send for names beyond ASCII; empty: missing."""
    found = ENCODED_NAME.search(disposition)
    return _text(unquote_to_bytes(found[1])) if found else ""


def bad_request(message: str, param: str | None = None) -> RequestError:
    """Return the error for a wrong field of a request."""
    return RequestError(400, "invalid_request_error", message, param=param)


def _too_large(most: int) -> RequestError:
    return RequestError(413, "request_too_large", f"The file is larger than the limit of {most} bytes")


ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/generate",
)
"""Routes that the rows of a batch may call."""

MODEL_OPTIONAL = "/generate"
"""The endpoint whose bodies may omit the model if only one model is served."""

UNKNOWN_MODEL = "model_not_found"
"""Code of the error of a row whose model is not served."""

MAX_ERRORS = 100
"""Most errors of a file, or of a batch."""

MAX_ID = 512
"""Most characters of a `custom_id`."""

LISTED_MODELS = 20
"""Most models that a message names."""


def batch_error(code: str, message: str, *, line: int | None = None, param: str | None = None) -> JSON:
    """Return an error in the shape of OpenAI's `errors.data`."""
    return {"code": code, "line": line, "message": message, "param": param}


def read_rows(file: IO[bytes], limits: BatchesSettings) -> RowPlan:
    """Parse the rows of an upload, check the rules that hold in every batch, and plan the rows.

    Only a hash of each `custom_id` is kept in memory.

    Args:
        file: The upload.
        limits: Limits on lines and bytes.
    """
    reading = _Reading(limits)
    for line in read_lines(file, limits.max_line_bytes):
        reading.line(line)
        if len(reading.errors) >= MAX_ERRORS or reading.total > limits.max_lines:
            break
    return reading.planner.finish(reading.errors[:MAX_ERRORS])


def check(plan: RowPlan, endpoint: str, models: Collection[str], max_lines: int) -> list[JSON]:
    """Return OpenAI's errors of the rows of a batch, in the order of the input; empty: the batch may run.

    Args:
        plan: The plan of the input.
        endpoint: The route that the rows have to call.
        models: The models that the rows may name.
        max_lines: Most rows.
    """
    errors = list(plan.errors)
    wrong = {
        number: found
        for number, target in enumerate(plan.targets)
        if (found := [*_wrong(target, endpoint, models)])
    }
    if wrong or len(plan) > max_lines:
        own: list[JSON] = []
        for number, entry in enumerate(plan):
            if number == max_lines:
                own.append(_too_many(max_lines, entry.line))
            if number == max_lines or len(own) >= MAX_ERRORS:
                break
            own += [error | {"line": entry.line} for error in wrong.get(entry.target, ())]
        errors = sorted(errors + own, key=lambda error: int(error["line"]))
    elif not (plan or errors):
        errors = [batch_error("empty_file", "The file has no rows")]
    return errors[:MAX_ERRORS]


def _wrong(target: Target, endpoint: str, models: Collection[str]) -> Iterator[JSON]:
    """Yield the errors of rows with a target in a batch."""
    if target.url != endpoint:
        message = f"url must be the endpoint of the batch, {endpoint}"
        yield batch_error("mismatched_url", message, param="url")
    model = target.model
    if model is None:
        if endpoint != MODEL_OPTIONAL or len(models) != 1:
            yield _missing("body.model")
    elif model not in models:
        served = sorted(models)
        known = ", ".join(served[:LISTED_MODELS]) + (", ..." if len(served) > LISTED_MODELS else "")
        message = f"The model {model!r} is not served here; served are: {known or 'none'}"
        yield batch_error(UNKNOWN_MODEL, message, param="body.model")


def _missing(param: str, line: int | None = None) -> JSON:
    return batch_error(
        "missing_required_parameter", f"{param}: required, but missing", line=line, param=param
    )


def _too_many(most: int, line: int) -> JSON:
    return batch_error("too_many_rows", f"The file has more than {most} rows, which is the limit", line=line)


class _Reading:
    """The rows of an upload, after the lines so far."""

    def __init__(self, limits: BatchesSettings) -> None:
        self.total = 0
        self.errors: list[JSON] = []
        self.planner = Planner()
        self._limits = limits
        self._first_lines: dict[bytes, int] = {}

    def line(self, line: InputLine) -> None:
        """Check a line, and add its row to the plan."""
        self.total += 1
        if self.total > self._limits.max_lines:
            self.errors.append(_too_many(self._limits.max_lines, line.number))
        elif line.text is None:
            most = self._limits.max_line_bytes
            self._add(line, "line_too_long", f"This line is longer than {most} bytes, which is the limit")
        else:
            try:
                row = from_json(line.text, allow_inf_nan=False)
            except ValueError as error:
                self._add(line, "invalid_json_line", f"This line is not valid JSON: {error}")
                return
            if isinstance(row, dict):
                self._row(line, row)
            else:
                self._add(line, "invalid_json_line", "This line is not a JSON object")

    def _row(self, line: InputLine, row: JSON) -> None:
        self._custom_id(line, row)
        if self._has(line, row, "method") and row["method"] != "POST":
            self._add(line, "invalid_method", "method must be POST", "method")
        has_url = self._has(line, row, "url")
        if not self._has(line, row, "body"):
            return
        body = row["body"]
        if not isinstance(body, dict):
            self._add(line, "invalid_type", "body must be a JSON object", "body")
            return
        model = body.get("model")
        if not isinstance(model, str | None):
            self._add(line, "invalid_type", "body.model must be a string", "body.model")
        elif has_url:
            if model is not None and len(model) > MAX_ID:
                # No model has such an id.
                model = f"{model[:MAX_ID]}..."
            url = row["url"]
            self.planner.add(line, body, Target(url if url in ENDPOINTS else "", model))
        if body.get("stream"):
            message = "stream must be false: the rows of a batch are not streamed"
            self._add(line, "invalid_value", message, "body.stream")

    def _custom_id(self, line: InputLine, row: JSON) -> None:
        if not self._has(line, row, "custom_id"):
            return
        custom_id = row["custom_id"]
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID:
            message = f"custom_id must be a string of 1 to {MAX_ID} characters"
            self._add(line, "invalid_type", message, "custom_id")
            return
        # A hash: a long id takes no more memory than a short id.
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = self._first_lines.setdefault(digest, line.number)
        if first != line.number:
            message = f"custom_id must be unique; line {first} has the same one"
            self._add(line, "duplicate_custom_id", message, "custom_id")

    def _has(self, line: InputLine, row: JSON, name: str) -> bool:
        if row.get(name) is None:
            self.errors.append(_missing(name, line.number))
            return False
        return True

    def _add(self, line: InputLine, code: str, message: str, param: str | None = None) -> None:
        self.errors.append(batch_error(code, message, line=line.number, param=param))
