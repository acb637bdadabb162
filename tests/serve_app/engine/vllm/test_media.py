"""Media by URL: what is fetched, and what never is. A server on loopback counts its visitors."""

import asyncio
import base64
import io
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
import vllm.envs as envs
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.renderers import chat_utils
from vllm.renderers.chat_utils import AsyncMultiModalContentParser

from serve_app.engine.vllm.media import (
    AllowedHostsConnector,
    PublicConnection,
    is_public,
    use_allowed_hosts,
)
from tests.progress import STILL_S

LIMIT_S = STILL_S
HOST = "images.example.com"
PUBLIC = "93.184.215.14"


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


@pytest.fixture
async def canary() -> AsyncIterator[Canary]:
    canary = Canary()
    server = await asyncio.start_server(canary.answer, "127.0.0.1", 0)
    canary.port = server.sockets[0].getsockname()[1]
    async with server:
        yield canary


class Resolver(AbstractResolver):
    """Resolves every name to the same addresses."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


connections: list[PublicConnection] = []


@pytest.fixture(autouse=True)
async def closed_sessions() -> AsyncIterator[None]:
    """Close the sessions of a test's connectors."""
    yield
    while connections:
        if (session := connections.pop()._session) is not None:
            await session.close()


def connector(*hosts: str, addresses: tuple[str, ...] = ("127.0.0.1",), **options: Any) -> Any:
    """Return a connector that allows hosts, whose names resolve to the addresses."""
    connection = PublicConnection(lambda: Resolver(*addresses), **options)
    connections.append(connection)
    return AllowedHostsConnector(connection=connection, allowed_media_domains=list(hosts))


async def refusal(connector: Any, url: str, method: str = "fetch_image_async") -> str:
    """Return the message of a URL that is refused; it is a 400 of vLLM's application."""
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(VLLMValidationError) as caught:
            await getattr(connector, method)(url)
    assert create_error_response(caught.value).error.code == 400
    return str(caught.value)


METHODS = ["fetch_image_async", "fetch_video_async", "fetch_audio_async"]


@pytest.mark.parametrize("method", METHODS)
async def test_no_url_is_fetched_unless_a_host_is_allowed(canary: Canary, method: str) -> None:
    for host in ("127.0.0.1", "localhost", HOST):
        message = await refusal(connector(), f"http://{host}:{canary.port}/", method)
        assert "engine.allowed_media_domains names no host" in message
        assert await refusal(connector("other.example.com"), f"http://{host}:{canary.port}/", method)
    assert canary.visits == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1"])
async def test_a_private_address_is_refused_even_if_it_is_allowed(
    canary: Canary, method: str, host: str
) -> None:
    allowed = connector(host, host.strip("[]"), "::ffff:7f00:1")
    assert "public Internet" in await refusal(allowed, f"http://{host}:{canary.port}/", method)
    assert canary.visits == []


@pytest.mark.parametrize(
    "addresses", [("127.0.0.1",), (PUBLIC, "127.0.0.1"), ("::1",), ("169.254.169.254",), ("fd00:ec2::254",)]
)
async def test_a_name_of_a_private_address_is_refused(canary: Canary, addresses: tuple[str, ...]) -> None:
    message = await refusal(connector(HOST, addresses=addresses), f"http://{HOST}:{canary.port}/")
    assert f"{HOST!r} is not on the public Internet" in message
    assert canary.visits == []


async def test_an_allowed_host_is_asked_and_its_picture_is_read(canary: Canary) -> None:
    allowed = connector(HOST, allowed=lambda address: address == "127.0.0.1")
    image = await allowed.fetch_image_async(f"http://{HOST.upper()}:{canary.port}/a.png")
    assert image.size == (3, 2)
    assert canary.visits == ["/a.png"]


async def test_a_redirect_is_not_followed(canary: Canary) -> None:
    allowed = connector(HOST, allowed=lambda address: address == "127.0.0.1")
    assert "redirects" in await refusal(allowed, f"http://{HOST}:{canary.port}/moved")
    assert canary.visits == ["/moved"]


async def test_a_proxy_of_the_environment_is_not_used(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{canary.port}")
    await refusal(connector(HOST), f"http://{HOST}/")
    assert canary.visits == []


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com@127.0.0.1:{port}/",
        "http://127.0.0.1:{port}#@images.example.com/",
        "http://127.0.0.1:{port}?@images.example.com/",
        "http://2130706433:{port}/",
        "http://0x7f.1:{port}/",
        "HTTP://127.1:{port}/",
        "http:127.0.0.1:{port}/",
        "//127.0.0.1:{port}/",
        "ftp://images.example.com/",
        "gopher://127.0.0.1:{port}/",
        "file:///etc/passwd",
        "http://",
        "http://[::1/",
        "",
        "\x00",
    ],
)
async def test_no_way_to_write_a_url_leads_elsewhere(canary: Canary, url: str) -> None:
    # The resolver sends every name to the server, so that only the names decide.
    allowed = connector(HOST, allowed=lambda address: True)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises((VLLMValidationError, ValueError)) as caught:
            await allowed.fetch_image_async(url.replace("{port}", str(canary.port)))
    assert create_error_response(caught.value).error.code == 400
    assert canary.visits == []


def test_fetches_outside_the_event_loop_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="data: URL"):
        connector(HOST, addresses=(PUBLIC,)).fetch_image(f"http://{HOST}/")


async def test_content_in_the_request_itself_needs_no_host() -> None:
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    assert (await connector().fetch_image_async(url)).size == (3, 2)
    assert connector().fetch_image(url).size == (3, 2)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True),
        ("2606:4700:4700::1111", True),
        ("::ffff:93.184.215.14", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.100.100.200", False),
        ("168.63.129.16", False),
        ("192.0.0.192", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:169.254.169.254", False),
        ("::169.254.169.254", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b:1::a9fe:a9fe", False),
        ("2002:a9fe:a9fe::1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


class Items:
    """Collects what vLLM's parser of a message would fetch."""

    media_io_kwargs = None
    allowed_local_media_path = ""
    allowed_media_domains: list[str] | None = None
    video_processor_name = None
    model_config = SimpleNamespace(allowed_media_domains=None)

    def __init__(self) -> None:
        self.fetches: list[Any] = []

    def add(self, modality: str, fetch: Any) -> None:
        self.fetches.append(fetch)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
async def test_vllm_reads_the_parts_of_a_message_through_it(canary: Canary, kind: str) -> None:
    before = dict(MEDIA_CONNECTOR_REGISTRY.name2class)
    use_allowed_hosts()
    try:
        items: Any = Items()
        getattr(AsyncMultiModalContentParser(items), f"parse_{kind}")(f"http://127.0.0.1:{canary.port}/")
        (fetch,) = items.fetches
        with pytest.raises(VLLMValidationError, match=r"engine\.allowed_media_domains"):
            await fetch()
    finally:
        MEDIA_CONNECTOR_REGISTRY.name2class.update(before)
    assert canary.visits == []
    assert envs.VLLM_MEDIA_CONNECTOR == "http"


def messages_of(part: Any) -> Any:
    """Return what vLLM makes of a chat with one part."""
    config: Any = SimpleNamespace(
        multimodal_config=None,
        allowed_local_media_path="",
        allowed_media_domains=None,
        enable_prompt_embeds=0,
    )
    return chat_utils.parse_chat_messages([{"role": "user", "content": [part]}], config, "string")


def test_no_other_part_of_vllm_s_server_fetches_by_url() -> None:
    """A new version of vLLM may: each file that is added here was looked at."""
    root = Path(vllm.__file__).parent
    words = re.compile(r"global_http_connection|\brequests\.get\(|urlopen\(|aiohttp\.ClientSession\(")
    rooms = ("entrypoints/openai", "entrypoints/anthropic", "entrypoints/serve", "entrypoints/pooling")
    files = [file for room in (*rooms, "renderers", "multimodal") for file in (root / room).rglob("*.py")]
    assert len(files) > 100
    found = {str(file.relative_to(root)) for file in files if words.search(file.read_text())}
    assert found == {"multimodal/media/connector.py"}
