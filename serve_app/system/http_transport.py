"""httpx over aiohttp: the CPU of a call doesn't grow with the calls at once.

The pool of httpx looks through all its connections at each call, and asks the kernel about each idle one.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp
import httpx

IDLE_S = 5.0
"""Seconds that an idle connection is kept, as httpx does."""

ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.ClientError, httpx.ReadError),
    (TimeoutError, httpx.WriteTimeout),
    (OSError, httpx.ReadError),
)
"""Errors of aiohttp, and what they are in httpx; the first that fits counts."""


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        kind = next(ours for theirs, ours in ERRORS if isinstance(error, theirs))
        raise kind(str(error)) from error


class _Body(httpx.AsyncByteStream):
    """The body of an answer."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of_httpx():
            async for piece in self._response.content.iter_any():
                yield piece

    async def aclose(self) -> None:
        """Give the connection back; a connection with the rest of an answer is closed."""
        self._response.release()


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Sends the requests of an `httpx.AsyncClient` by aiohttp, over any number of connections.

    The connections are direct: a proxy is left to httpx.

    Args:
        verify: Certificates that are trusted.
    """

    def __init__(self, verify: ssl.SSLContext) -> None:
        self._verify = verify
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return the answer as soon as it begins.

        Raises:
            httpx.TransportError: There is no answer.
        """
        if self._session is None:
            # A session belongs to the event loop that runs.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=self._verify)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False)
        seconds = request.extensions.get("timeout", {})
        connect, write, read = (seconds.get(name) for name in ("connect", "write", "read"))
        known = None not in (connect, write, read)
        with _errors_of_httpx():
            # aiohttp has no limit for the time to send.
            async with asyncio.timeout(connect + write + read if known else None):
                response = await self._session.request(
                    request.method,
                    str(request.url),
                    headers=request.headers.multi_items(),
                    data=request.stream if "content-length" in request.headers else None,
                    skip_auto_headers=("content-type",),
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(sock_connect=connect, sock_read=read),
                )
        return httpx.Response(
            response.status,
            headers=response.raw_headers,
            stream=_Body(response),
            extensions={"http_version": b"HTTP/1.1", "reason_phrase": (response.reason or "").encode()},
        )

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
