"""httpx over aiohttp: answers as httpx has them, and each way to get none."""

import asyncio
import gzip
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from serve_app.system.http_transport import AiohttpTransport
from tests.ports import free_port

SHORT_S = 0.2
LONG_S = 60.0
MANY_BYTES = 32 << 20

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


@asynccontextmanager
async def listening(serve: Callable[[Reader, Writer], Awaitable[None]]) -> AsyncIterator[str]:
    """Run a server that gets the bytes of each connection; yield its URL."""

    async def connected(reader: Reader, writer: Writer) -> None:
        await serve(reader, writer)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answering(answer: bytes) -> Callable[[Reader, Writer], Awaitable[None]]:
    """Return what a server does that reads the head of a request, and sends these bytes."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    return serve


def client(url: str, **limits: float) -> httpx.AsyncClient:
    transport = AiohttpTransport(ssl.create_default_context())
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=httpx.Timeout(LONG_S, **limits))


async def test_a_request_and_its_answer_are_those_of_httpx() -> None:
    heads: list[bytes] = []
    bodies: list[bytes] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        for body in (b'{"a":1}', b""):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            bodies.append(await reader.readexactly(len(body)))
            text = gzip.compress(b'{"b":2}')
            head = b"HTTP/1.1 200 Fine\r\ncontent-encoding: gzip\r\nx-two: 1\r\nx-two: 2\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(text), text))

    async with listening(serve) as url, client(url) as http:
        answer = await http.post("/x?y=1", json={"a": 1}, headers={"x-mine": "7"})
        again = await http.get("/z", headers=[("x-mine", "8"), ("x-mine", "9")])
    assert (answer.status_code, answer.reason_phrase, answer.json()) == (200, "Fine", {"b": 2})
    assert answer.headers.get_list("x-two") == ["1", "2"]
    assert str(answer.url) == f"{url}/x?y=1"
    assert again.json() == {"b": 2}
    assert bodies == [b'{"a":1}', b""]
    first, second = ([line.lower() for line in head.split(b"\r\n")] for head in heads)
    assert first[0] == b"post /x?y=1 http/1.1"
    assert {b"x-mine: 7", b"content-length: 7", b"content-type: application/json"} <= set(first)
    assert {b"x-mine: 8", b"x-mine: 9"} <= set(second)
    assert not any(line.startswith((b"content-length", b"transfer-encoding")) for line in second)


async def test_a_large_body_arrives() -> None:
    sizes: list[int] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        sizes.append(len(await reader.readexactly(MANY_BYTES)))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with listening(serve) as url, client(url) as http:
        assert (await http.post("/", content=b"x" * MANY_BYTES)).status_code == 204
    assert sizes == [MANY_BYTES]


async def test_a_redirect_is_an_answer() -> None:
    answer = b"HTTP/1.1 302 Found\r\nlocation: /login\r\ncontent-length: 0\r\n\r\n"
    async with listening(answering(answer)) as url, client(url) as http:
        assert (await http.get("/")).status_code == 302


async def test_an_answer_comes_as_it_is_sent() -> None:
    goes_on = asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await goes_on.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    async with listening(serve) as url, client(url) as http, http.stream("GET", "/") as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"a"
        goes_on.set()
        assert await anext(pieces) == b"b"


async def test_a_connection_is_used_again() -> None:
    requests: list[int] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        requests.append(0)
        while await reader.readuntil(b"\r\n\r\n"):
            requests[-1] += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab")

    async with listening(serve) as url, client(url) as http:
        await http.get("/")
        await http.get("/")
    assert requests == [2]


async def test_a_connection_with_the_rest_of_an_answer_is_closed() -> None:
    closed = asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\na")
        await reader.read()
        closed.set()

    async with listening(serve) as url, client(url) as http:
        async with http.stream("GET", "/"):
            pass
        await closed.wait()


async def nothing(reader: Reader, writer: Writer) -> None:
    """Close a connection without an answer."""
    await reader.readuntil(b"\r\n\r\n")


async def silence(reader: Reader, writer: Writer) -> None:
    """Read the rest, and answer nothing."""
    await reader.read()


@pytest.mark.parametrize(
    ("serve", "limits", "error"),
    [
        (nothing, {}, httpx.ReadError),
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab"), {}, httpx.ReadError),
        (answering(b"no http\r\n\r\n"), {}, httpx.ReadError),
        (silence, {"read": SHORT_S}, httpx.ReadTimeout),
    ],
)
async def test_an_answer_that_breaks_off_is_an_error_of_httpx(
    serve: Callable[[Reader, Writer], Awaitable[None]], limits: dict[str, float], error: type[Exception]
) -> None:
    async with listening(serve) as url, client(url, **limits) as http:
        with pytest.raises(error):
            await http.get("/")


async def test_a_request_that_nobody_reads_ends() -> None:
    stuck = asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        await stuck.wait()

    limits = {"connect": SHORT_S, "read": SHORT_S, "write": SHORT_S}
    async with listening(serve) as url, client(url, **limits) as http:
        with pytest.raises(httpx.WriteTimeout):
            await http.post("/", content=b"x" * MANY_BYTES)
        stuck.set()


async def test_a_service_that_is_not_there_is_told() -> None:
    async with client(f"http://127.0.0.1:{free_port()}") as http:
        with pytest.raises(httpx.ConnectError, match="Connect call failed"):
            await http.get("/")
    async with client("http://service.invalid") as http:
        with pytest.raises(httpx.ConnectError, match=r"service\.invalid"):
            await http.get("/")


async def test_a_connection_that_nobody_accepts_ends() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        others = [socket.socket() for _ in range(4)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        async with client(f"http://127.0.0.1:{full.getsockname()[1]}", connect=SHORT_S) as http:
            with pytest.raises(httpx.ConnectTimeout):
                await http.get("/")
        for other in others:
            other.close()


async def test_a_cancelled_call_closes_its_connection() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        closed.set()

    async with listening(serve) as url, client(url) as http:
        call = asyncio.ensure_future(http.get("/"))
        await asked.wait()
        call.cancel()
        await closed.wait()
        assert call.cancelled()
