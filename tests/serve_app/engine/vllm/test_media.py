"""Media by URL: what vLLM fetches with the service's settings. A server on loopback counts its visitors."""

import asyncio
import base64
import io
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import vllm
import vllm.envs as envs
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image
from vllm.connections import HTTPConnection
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMClientError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from serve_app.engine.openai import NO_FILE
from tests.progress import STILL_S

LIMIT_S = STILL_S
HOST = "images.example.com"


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    return file.getvalue()


class Canary:
    """A server on loopback.

    Attributes:
        port: Where it listens.
        visits: The paths that it was asked for.
    """

    def __init__(self) -> None:
        self.visits: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        self.visits.append(path)
        if path == "/moved":
            head = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:%d/secret\r\n" % self.port
            body = b""
        else:
            head, body = b"HTTP/1.1 200 OK\r\n", picture()
        writer.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()


class ToLoopback(AbstractResolver):
    """Resolves every name to loopback, so that the names alone decide what is fetched."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=0, flags=0)
        ]

    async def close(self) -> None:
        pass


@pytest.fixture
async def canary() -> AsyncIterator[Canary]:
    canary = Canary()
    server = await asyncio.start_server(canary.answer, "127.0.0.1", 0)
    canary.port = server.sockets[0].getsockname()[1]
    async with server:
        yield canary


@pytest.fixture
async def connection(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HTTPConnection]:
    # As `VLLMEngine` sets it.
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    connection = HTTPConnection()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=ToLoopback())) as session:
        connection._async_client = session
        yield connection


def connector(connection: HTTPConnection, *hosts: str) -> Any:
    """Return vLLM's connector with the hosts that it allows."""
    return MEDIA_CONNECTOR_REGISTRY.load(
        envs.VLLM_MEDIA_CONNECTOR,
        connection=connection,
        allowed_local_media_path="",
        allowed_media_domains=list(hosts) or ["none, since engine.allowed_media_domains is empty"],
    )


async def refusal(connector: Any, url: str, method: str = "fetch_image_async") -> str:
    """Return the message of a URL that is refused; it is a 400 of vLLM's application."""
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises((ValueError, VLLMClientError)) as caught:
            await getattr(connector, method)(url)
    assert create_error_response(caught.value).error.code in (400, 422), caught.value
    return str(caught.value)


@pytest.mark.parametrize("method", ["fetch_image_async", "fetch_video_async", "fetch_audio_async"])
async def test_no_url_is_fetched_unless_its_host_is_allowed(
    canary: Canary, connection: HTTPConnection, method: str
) -> None:
    for host in ("127.0.0.1", "localhost", HOST):
        message = await refusal(connector(connection), f"http://{host}:{canary.port}/", method)
        assert "engine.allowed_media_domains is empty" in message
        await refusal(connector(connection, "other.example.com"), f"http://{host}:{canary.port}/", method)
    assert canary.visits == []


@pytest.mark.parametrize("host", [HOST, "127.0.0.1"])
async def test_an_allowed_host_is_asked_whatever_its_address_is(
    canary: Canary, connection: HTTPConnection, host: str
) -> None:
    url = f"http://{host.upper()}:{canary.port}/a.png"
    assert (await connector(connection, host).fetch_image_async(url)).size == (3, 2)
    assert canary.visits == ["/a.png"]


async def test_a_redirect_is_not_followed(canary: Canary, connection: HTTPConnection) -> None:
    await refusal(connector(connection, HOST), f"http://{HOST}:{canary.port}/moved")
    assert canary.visits == ["/moved"]


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com@127.0.0.1:{port}/",
        "http://images.example.com:{port}@127.0.0.1:{port}/",
        "http://images.example.com\\@127.0.0.1:{port}/",
        "http://127.0.0.1:{port}\\@images.example.com/",
        "http://127.0.0.1:{port}#@images.example.com/",
        "http://127.0.0.1:{port}?@images.example.com/",
        "http://2130706433:{port}/",
        "http://0x7f.1:{port}/",
        "HTTP://127.1:{port}/",
        "http:127.0.0.1:{port}/",
        "//127.0.0.1:{port}/",
        "ftp://images.example.com/",
        "gopher://127.0.0.1:{port}/",
        "http://",
        "http://[::1/",
        "",
        "\x00",
    ],
)
async def test_no_way_to_write_a_url_leads_elsewhere(
    canary: Canary, connection: HTTPConnection, url: str
) -> None:
    hosts: list[str] = []

    class Noted(ToLoopback):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            hosts.append(host)
            raise ValueError("no address")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=Noted())) as session:
        connection._async_client = session
        with pytest.raises((ValueError, VLLMClientError)):
            async with asyncio.timeout(LIMIT_S):
                await connector(connection, HOST).fetch_image_async(url.replace("{port}", str(canary.port)))
    assert canary.visits == []
    assert set(hosts) <= {HOST}


async def test_no_file_is_read(connection: HTTPConnection) -> None:
    # `serve_app.engine.openai.refusal` makes a 400 of it.
    with pytest.raises(RuntimeError, match=NO_FILE):
        await connector(connection, HOST).fetch_image_async("file:///etc/passwd")


@pytest.mark.parametrize("method", ["fetch_image_async", "fetch_video_async"])
@pytest.mark.parametrize("content", ["", ",", "image/png,x", "image/png;base64,%", "image/png;base64,AAAA"])
async def test_broken_content_is_a_mistake_of_the_request(
    connection: HTTPConnection, method: str, content: str
) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        await getattr(connector(connection), method)(f"data:{content}")
    # vLLM's 501 is a 400 of the service.
    assert create_error_response(caught.value).error.code in (400, 501)


async def test_content_in_the_request_itself_needs_no_host(connection: HTTPConnection) -> None:
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    assert (await connector(connection).fetch_image_async(url)).size == (3, 2)


def test_no_other_part_of_vllm_s_server_fetches_by_url() -> None:
    """A new version of vLLM may: each file that is added here was looked at."""
    root = Path(vllm.__file__).parent
    words = re.compile(r"global_http_connection|\brequests\.get\(|urlopen\(|aiohttp\.ClientSession\(")
    rooms = ("entrypoints/openai", "entrypoints/anthropic", "entrypoints/serve", "entrypoints/pooling")
    files = [file for room in (*rooms, "renderers", "multimodal") for file in (root / room).rglob("*.py")]
    assert len(files) > 100
    found = {str(file.relative_to(root)) for file in files if words.search(file.read_text())}
    assert found == {"multimodal/media/connector.py"}
