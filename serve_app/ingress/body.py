"""Bodies of requests, read within bounds on their size, their time, and the bytes of all bodies together."""

import asyncio
import sys
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from serve_app.api.errors import RequestError
from serve_app.settings.ingress import IngressSettings

BOM = b"\xef\xbb\xbf"
"""Mark before a text in UTF-8, as editors on Windows write it; it isn't part of the text."""

BODY_S = 60.0
"""Seconds until a body of at most `most` bytes has to be here, where no setting says so."""

SMALL = 64 * 1024
"""A body up to this many bytes may use the whole budget, a larger body may not use the last part of
it: so large bodies can't keep small bodies out."""

KEPT_PART = 2
"""Streams are kept in the first half of the budget only: bodies without room are refused."""

LAST_PART = 8
"""The last part of the budget is an eighth."""

RETRY_AFTER_S = 1.0
"""Seconds after which a refused client comes back. A large body on its way gives up its bytes once it is
answered, which may be at any time."""

LARGE_BYTES = 1 << 18
"""A body with more bytes is large: a look into it takes milliseconds, a look into 32 MiB up to a second."""

T = TypeVar("T")


async def read_body(request: Request, limits: IngressSettings) -> bytes:
    """Return the body of a request, without a byte order mark.

    Raises:
        RequestError: 413, it is too large; 503, the bodies of all requests together are; 408, it comes too
            slowly; 400, it ends early; 415, it is encoded.
    """
    return await _read(request, limits.max_body_bytes, limits.body_timeout_s, "ingress.")


async def small_body(request: Request, most: int, timeout_s: float = BODY_S) -> bytes:
    """Return the body of a request that is small by its nature, without a byte order mark.

    Args:
        request: The request.
        most: Maximum bytes that the body may have.
        timeout_s: Seconds until the body has to be here.

    Raises:
        RequestError: See `read_body`.
    """
    return await _read(request, most, timeout_s)


def refuse_encoding(request: Request) -> None:
    """Raise a RequestError, 415, if the body of a request is compressed."""
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        message = f"Content-Encoding: {encoding} is not supported here; send the body as it is"
        raise RequestError(415, "invalid_request_error", message, param="content-encoding")


async def _read(request: Request, most: int, timeout_s: float, settings: str = "") -> bytes:
    refuse_encoding(request)
    body = bytearray()
    size = int(request.headers.get("content-length") or 0)
    if size <= most:
        held = held_body(request.scope)
        held.expect(size)
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                async for piece in request.stream():
                    size += len(piece)
                    if size > most:
                        break
                    held.add(len(piece))
                    body += piece
        except TimeoutError:
            setting = f" ({settings}body_timeout_s)" if settings else ""
            message = f"The body was not here after {timeout_s:g} s{setting}"
            raise RequestError(408, "timeout_error", message) from None
        except ClientDisconnect:
            # The client is gone; the error ends the request.
            raise RequestError(400, "invalid_request_error", "The body ended early") from None
    if size > most:
        setting = f" ({settings}max_body_bytes)" if settings else ""
        message = f"The body is larger than the limit of {most} bytes{setting}"
        raise RequestError(413, "request_too_large", message)
    if body.startswith(BOM):
        del body[: len(BOM)]
    return bytes(body)


# The bytes of all bodies


class BodyBudget:
    """Counts the bytes of the bodies that this replica holds.

    Attributes:
        most: Maximum bytes at once.
        held: Bytes held now.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def check(self, size: int, more: int) -> None:
        """Raise if a body has no room for more bytes.

        Args:
            size: Bytes of the body, with `more`.
            more: Bytes that are not counted yet.

        Raises:
            RequestError: 503, with the seconds to wait.
        """
        most = self.most if size <= SMALL else self.most - self.most // LAST_PART
        if self.held + more > most:
            message = (
                f"The requests that are being served hold {self.held} bytes of the {self.most} for request "
                "bodies (ingress.max_bytes_in_flight). Try again."
            )
            raise RequestError(503, "overloaded_error", message, retry_after_s=RETRY_AFTER_S)


class HeldBody:
    """The bytes that one request holds of a budget.

    Args:
        budget: The budget.
    """

    __slots__ = ("_budget", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    def expect(self, size: int) -> None:
        """Raise a RequestError, 503, if a body of `size` bytes that is to come has no room now.

        Nothing is counted: a client that announces bytes and doesn't send them keeps nobody else out.
        """
        self._budget.check(size, size - self.size)

    def add(self, size: int) -> None:
        """Count bytes that have come; raise a RequestError, 503, if they have no room."""
        self._budget.check(self.size + size, size)
        self._budget.held += size
        self.size += size

    def keep(self, size: int) -> bool:
        """Count bytes of an answer, if there is room to keep them; return whether there is."""
        if self._budget.held + size > self._budget.most // KEPT_PART:
            return False
        self._budget.held += size
        self.size += size
        return True

    def drop(self, size: int) -> None:
        """Give some bytes back."""
        self._budget.held -= size
        self.size -= size

    def give_back(self) -> None:
        """Give all bytes back."""
        self.drop(self.size)


def held_body(scope: MutableMapping[str, Any]) -> HeldBody:
    """Return the part of its replica's budget that a request holds.

    Without a budget, as in the Batches deployment, the bytes are counted for nobody.
    """
    context = scope.get("state", {}).get("context")
    return HeldBody(BodyBudget(sys.maxsize)) if context is None else context.body


# Work on large bodies

_thread = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")


async def look(size: int, call: Callable[[], T]) -> T:
    """Return the result of a call that looks into a body: beside the event loop if the body is large.

    The parsers keep the interpreter's lock, but each for a part of the work only; other requests get their
    turns in between, and no more than one large body is looked into at once.

    Args:
        size: Bytes of the body.
        call: Looks into it.
    """
    if size <= LARGE_BYTES:
        return call()
    waiting = [call]
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread, lambda: waiting.pop()())
    finally:
        # The thread keeps what it is to do until its turn, also for a client that has left.
        waiting.clear()
