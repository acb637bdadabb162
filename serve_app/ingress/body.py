"""Request bodies: read within limits, and looked into without parsing all of them.

The Ingress needs a few fields of a body, and how long its lists are. The Engine parses the rest.
"""

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
from pydantic_core import from_json, to_json
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from serve_app.api.errors import RequestError
from serve_app.api.small_body import BOM
from serve_app.ingress.body_budget import held_body
from serve_app.settings.ingress import IngressSettings

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"")


_MESSAGE = msgspec.json.Decoder(_Message)
_LIST_START = re.compile(rb"\[\s*(\S)")
_NUMBER = b"-0123456789"
_DEEPEST = 4
"""Lists in lists that messages may be in: those of chats, of messages, and two that no route has."""

_MOST_BOUNDARY = 70
"""Most bytes of the boundary of a form, by RFC 2046."""

_PART_HEAD = 4096
"""Most bytes of the head of a part of a form."""

_MOST_PARAMETERS = 32
"""Most parameters of the head of a part: its name, and that of its file, which may have semicolons."""

_MOST_PARTS = 2_000
"""Parts of a form that are looked at; vLLM's application refuses a form with more fields or files."""

_MOST_VALUE = 4_096
"""Bytes of a value that the Ingress reads: a name, a number, a tier."""


async def read_body(request: Request, limits: IngressSettings) -> bytes:
    """Return the body of a request, without a byte order mark.

    Raises:
        RequestError: 413, it is too large; 503, the bodies of all requests together are; 408, it comes too
            slowly; 400, it ends early; 415, it is encoded.
    """
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        message = f"Content-Encoding: {encoding} is not supported here; send the body as it is"
        raise RequestError(415, "invalid_request_error", message, param="content-encoding")
    most = limits.max_body_bytes
    body = bytearray()
    size = int(request.headers.get("content-length") or 0)
    if size <= most:
        held = held_body(request.scope)
        held.expect(size)
        size = 0
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                async for piece in request.stream():
                    size += len(piece)
                    if size > most:
                        break
                    held.add(len(piece))
                    body += piece
        except TimeoutError:
            message = f"The body was not here after {limits.body_timeout_s:g} s (ingress.body_timeout_s)"
            raise RequestError(408, "timeout_error", message) from None
        except ClientDisconnect:
            # The client is gone; the error ends the request.
            raise RequestError(400, "invalid_request_error", "The body ended early") from None
    if size > most:
        message = f"The body is larger than the limit of {most} bytes (ingress.max_body_bytes)"
        raise RequestError(413, "request_too_large", message)
    if body.startswith(BOM):
        del body[: len(BOM)]
    return bytes(body)


def form_fields(body: bytes, content_type: str, names: Collection[str]) -> dict[str, str]:
    """Return the named fields that a form with files (`multipart/form-data`) has.

    Of several fields with one name it is the last, which vLLM's application takes: with any other, a client
    could use a model that its API key doesn't allow. An empty field counts as none, as it does there. The
    files are not looked into: they may be large, and the Engine parses the form.

    Raises:
        RequestError: 400, the boundary, a field or the head of a part is too long, or has too many
            parameters.
    """
    # The parser of vLLM's application. Headers have no other characters than those of Latin-1.
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if kind != b"multipart/form-data" or not (boundary := options.get(b"boundary")):
        return {}
    if len(boundary) > _MOST_BOUNDARY:
        message = f"content-type: has a boundary longer than {_MOST_BOUNDARY} bytes"
        raise RequestError(400, "invalid_request_error", message, param="content-type")
    found: dict[str, bytes] = {}
    named = re.compile(rb"(?<![\w-])(%s)(?![\w-])" % "|".join(names).encode())
    for head, content in _parts(body, re.escape(boundary)):
        # A look for the names first: parsing takes a hundred times as long.
        name = _field_of(head) if named.search(head) else None
        if name is not None and name in names:
            found[name] = content
    for name, content in found.items():
        # Not cut: a number may have its digits at the end.
        _check_value(name, len(content))
    return {name: content.decode(errors="replace") for name, content in found.items() if content}


class JSONBody:
    """A JSON object of which single fields are parsed on demand.

    Args:
        body: The text of the object.

    Raises:
        RequestError: 400, it is not a JSON object.
    """

    def __init__(self, body: bytes) -> None:
        self._fields = (_split(body) if _is_plain(body) else None) or _parse(body)

    def among(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that the object has."""
        return [name for name in names if name in self._fields]

    def values(self, *names: str) -> dict[str, Any]:
        """Return the values of those of the named fields that the object has.

        Raises:
            RequestError: 400, a value is too long or can't be read.
        """
        return {name: self._value(name) for name in names if name in self._fields}

    def count(self, name: str, most: int) -> int | None:
        """Return the length of a list, or a length up to `most` that it doesn't exceed.

        None: the field is not a list, or it is one of numbers, which is a single prompt in tokens.
        """
        field = self._fields.get(name)
        if not isinstance(field, msgspec.Raw):
            is_list = isinstance(field, list) and not (field and isinstance(field[0], int | float))
            return len(field) if is_list and isinstance(field, list) else None
        text = bytes(field)
        if not (start := _LIST_START.match(text)) or (first := start[1]) in _NUMBER:
            return None
        if first == b"]":
            return 0
        # A list has at most one item more than the text has commas: a long text is counted only if need be.
        commas = text.count(b",")
        return commas + 1 if commas < most else len(_LIST.decode(field))

    def count_parts(self, name: str, most: int) -> int:
        """Return the messages in a list, or a list of lists, and the parts of their contents.

        Or a number up to `most` that they don't exceed.

        Raises:
            RequestError: 400, the field is nested too deeply.
        """
        field = self._fields.get(name)
        text = bytes(field) if isinstance(field, msgspec.Raw) else b""
        # Messages and parts are objects or texts, unless they are wrong: mostly there are few of both.
        if text and (items := text.count(b"{") + text.count(b'"') // 2) <= most:
            return items
        try:
            return _count_raw_parts(text, _DEEPEST) if text else _count_parts(field, _DEEPEST)
        except (RecursionError, msgspec.MsgspecError):
            message = f"{name}: nested too deeply, or no list of messages"
            raise RequestError(400, "invalid_request_error", message, param=name) from None

    def text(self, names: Sequence[str], most: int) -> bytes:
        """Return the JSON text of the named fields that the object has, one behind the other.

        Args:
            names: The fields.
            most: Bytes after which the text is cut off.
        """
        fields = [self._fields[name] for name in names if name in self._fields]
        texts = [field if isinstance(field, msgspec.Raw) else to_json(field) for field in fields]
        return b"".join([memoryview(text)[:most] for text in texts])[:most]

    def replaced(self, name: str, value: str) -> bytes:
        """Return the text of the object with another value of a field."""
        return self._encode(self._fields | {name: value})

    def part(self, names: Collection[str]) -> bytes:
        """Return the text of the object with the named fields alone."""
        return self._encode({name: value for name, value in self._fields.items() if name in names})

    def parts_beside(self, names: Collection[str]) -> dict[str, bytes]:
        """Return the text of the object with one field alone, for each field that is not named."""
        return {name: self._encode({name: self._fields[name]}) for name in self._fields.keys() - names}

    def _encode(self, fields: dict[str, Any]) -> bytes:
        if isinstance(next(iter(self._fields.values()), None), msgspec.Raw):
            return msgspec.json.encode(fields)
        return to_json(fields)

    def _value(self, name: str) -> Any:
        field = self._fields[name]
        if isinstance(field, msgspec.Raw | str):
            _check_value(name, len(field))
        if not isinstance(field, msgspec.Raw):
            return field
        try:
            return msgspec.json.decode(field)
        except (ValueError, msgspec.MsgspecError, RecursionError):
            # A number of thousands of digits, a list of thousands of levels.
            message = f"{name}: is no value that can be read"
            raise RequestError(400, "invalid_request_error", message, param=name) from None


def _check_value(name: str, size: int) -> None:
    if size > _MOST_VALUE:
        message = f"{name}: has {size} bytes; at most {_MOST_VALUE} are read"
        raise RequestError(400, "invalid_request_error", message, param=name)


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the heads and the contents of the parts of a form.

    Args:
        body: The form.
        boundary: Its boundary, as a regular expression.
    """
    ends = re.compile(rb"\r\n--%s([ \t]*\r\n|--)" % boundary)
    begun = re.compile(rb"[\r\n]*--%s(\r\n|--)" % boundary).match(body)
    for _ in range(_MOST_PARTS):
        if begun is None or begun[1] == b"--":
            return
        start = begun.end()
        end = body.find(b"\r\n\r\n", start)
        if end - start > _PART_HEAD:
            message = f"The form has a part whose head is longer than {_PART_HEAD} bytes"
            raise RequestError(400, "invalid_request_error", message)
        begun = None if end < 0 else ends.search(body, end + 4)
        if begun is not None:
            yield body[start:end], body[end + 4 : begun.start()]


def _field_of(head: bytes) -> str | None:
    """Return the name of the field that a part of a form with this head is; None: it is a file."""
    disposition = b""
    for line in head.split(b"\r\n"):
        header, _, value = line.partition(b":")
        if header.lower() == b"content-disposition":
            disposition = value.strip()
    if disposition.count(b";") > _MOST_PARAMETERS:
        # Thousands of them in each of thousands of parts take the parser seconds.
        message = f"The form has a part with more than {_MOST_PARAMETERS} parameters"
        raise RequestError(400, "invalid_request_error", message)
    options = parse_options_header(disposition)[1]
    return None if b"filename" in options else options.get(b"name", b"").decode(errors="replace")


def _count_raw_parts(text: bytes, levels: int) -> int:
    """Count as `_count_parts` does, without parsing what isn't counted: numbers may be millions."""
    if text.startswith(b"{"):
        content = bytes(_MESSAGE.decode(text).content)
        return 1 + (len(_LIST.decode(content)) if _is_counted(content) else 0)
    if not _is_counted(text):
        return 0
    if not levels:
        raise RecursionError
    return sum(_count_raw_parts(bytes(item), levels - 1) for item in _LIST.decode(text))


def _is_counted(text: bytes) -> bool:
    """Return whether a text is a list, and not one of numbers."""
    start = _LIST_START.match(text)
    return start is not None and start[1] not in _NUMBER


def _count_parts(field: Any, levels: int) -> int:
    if isinstance(field, dict):
        content = field.get("content")
        return 1 + (len(content) if isinstance(content, list) else 0)
    if not isinstance(field, list) or not field or isinstance(field[0], int | float):
        return 0
    if not levels:
        raise RecursionError
    return sum(_count_parts(item, levels - 1) for item in field)


def _is_plain(body: bytes) -> bool:
    """Return whether text that isn't looked at can be valid: it is UTF-8, without escaped surrogates."""
    # A look for one byte first: it takes a tenth of the time.
    if b"\\" in body and (b"\\ud" in body or b"\\uD" in body):
        return False
    try:
        return body.isascii() or bool(body.decode())
    except UnicodeDecodeError:
        return False


def _split(body: bytes) -> dict[str, Any] | None:
    """Return the fields unparsed; None: the text is wrong, or has what strict JSON hasn't, such as NaN."""
    try:
        return _OBJECT.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _parse(body: bytes) -> dict[str, Any]:
    try:
        content = from_json(body)
    except ValueError as error:
        message = f"The body is not valid JSON: {error}"
        raise RequestError(400, "invalid_request_error", message) from None
    if not isinstance(content, dict):
        raise RequestError(400, "invalid_request_error", "The body must be a JSON object")
    return content
