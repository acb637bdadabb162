"""Upload of a file: a multipart form of which the file goes to the disk as it comes."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from serve_app.api.errors import RequestError
from serve_app.batches.content import Contents, Draft

ENCODED_NAME = re.compile(rb";\s*filename\*\s*=\s*utf-8'[^']*'([^;\s]+)", re.IGNORECASE)

FORM_BYTES = 1 << 16
"""Most bytes of a form beside its file."""

STALL_S = 60.0
"""Seconds without a byte after which an upload is given up."""


class Upload:
    """A form that is being received.

    Args:
        content: Gives the draft for the file.
        max_bytes: Most bytes of the file.

    Attributes:
        fields: The fields beside the file.
        filename: Name of the file.
        draft: Content of the file; None: none has come.
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
        """Raise a RequestError if too many of the bytes received so far are not the file's."""
        if received - self.size > FORM_BYTES:
            message = f"The form takes more than {FORM_BYTES} bytes beside its file"
            raise RequestError(413, "request_too_large", message)

    def discard(self) -> None:
        """Delete what was received, and what a thread still receives that is in the parser meanwhile."""
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
            raise _bad("The form must have one file, in the field `file`", "file")
        self.filename = _text(options.get(b"filename", b"")) or _encoded_name(self._disposition) or "file"
        self.draft = self._content.draft()
        if self._discarded:
            # The thread of a call that was cancelled goes on; `discard` found no draft.
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
        """Count an upload as long as the context lasts.

        Args:
            tenant: Its tenant.
            max_bytes: Most bytes of all uploads of the tenant.

        Yields:
            A function that takes the bytes by which the file has grown. It raises a RequestError if they are
            too many.
        """
        own = 0

        def grow(size: int) -> None:
            nonlocal own
            own += size
            self._bytes[tenant] += size
            if self._bytes[tenant] > max_bytes:
                message = f"the uploads of this tenant that are under way have more than {max_bytes} bytes"
                raise _bad(message, "file")

        try:
            yield grow
        finally:
            self._bytes[tenant] -= own
            if not self._bytes[tenant]:
                del self._bytes[tenant]


async def receive(
    request: Request, content: Contents, max_bytes: int, grow: Callable[[int], None] = lambda size: None
) -> Upload:
    """Receive a form.

    Args:
        request: The request.
        content: Gives the draft for the file, which the caller keeps or discards.
        max_bytes: Most bytes of the file.
        grow: Called with the bytes by which the file has grown. An error that it raises ends the upload.

    Raises:
        RequestError: 400, it isn't such a form, or ends early; 408, it stalls; 413, it is too large.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise _bad("The body must be a form (multipart/form-data) with the fields `purpose` and `file`")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes + FORM_BYTES:
        raise _too_large(max_bytes)
    upload = Upload(content, max_bytes)
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
            raise _bad("The form ends early")
    except FormParserError as error:
        upload.discard()
        raise _bad(f"The form can't be read: {error}") from None
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
            raise _bad("The body ended early") from None
        if piece:
            yield piece


def _text(data: bytes) -> str:
    # PostgreSQL stores no NUL.
    return data.decode("utf-8", "replace").replace("\0", "\ufffd")


def _encoded_name(disposition: bytes) -> str:
    """Return the name that a client has encoded, as some do with all but ASCII; empty: there is none."""
    found = ENCODED_NAME.search(disposition)
    return _text(unquote_to_bytes(found[1])) if found else ""


def _bad(message: str, param: str | None = None) -> RequestError:
    return RequestError(400, "invalid_request_error", message, param=param)


def _too_large(most: int) -> RequestError:
    return RequestError(413, "request_too_large", f"The file is larger than the limit of {most} bytes")
