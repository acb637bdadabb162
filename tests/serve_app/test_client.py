"""The client of a service: base URLs, typed answers, retries, and a message for each way to fail."""

import asyncio
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from serve_app.client import AsyncClient, Backoff, Client, Retries, ServiceError, base_url
from serve_app.rows.errors import RunError
from serve_app.rows.http import HTTPClient
from tests.ports import free_port
from tests.serve_app.cli.fake_service import FakeService, llm


@pytest.fixture
def service() -> Iterator[FakeService]:
    service = FakeService(lambda path, headers: (200, {"models": {}}))
    yield service
    service.stop()


def reason(client: Client) -> str:
    with client, pytest.raises(ServiceError) as caught:
        client.stats()
    return caught.value.message


async def reasons(url: str) -> list[str]:
    """Return the messages of both clients."""
    said = [await asyncio.to_thread(reason, Client(url))]
    async with AsyncClient(url) as client:
        with pytest.raises(ServiceError) as caught:
            await client.stats()
    return [*said, caught.value.message]


def test_statistics_and_health_are_typed(service: FakeService) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def answer(path: str, headers: dict[str, str]) -> tuple[int, Any]:
        asked.append((path, headers))
        if path == "/stats":
            return 200, {"models": {"m": {"replicas": [{"replica": "a", "max_model_len": 9}]}}}
        return 503, {"status": "starting", "models": {"m": {"state": "starting"}}}

    service.answer = answer
    with Client(f"{service.url}/v1/", "secret") as client:
        stats, health = client.stats(), client.health()
    assert client.url == service.url
    assert stats.models["m"].replicas[0].max_model_len == 9
    assert (health.status, health.model("m").state, health.model("n").state) == ("starting", "starting", None)
    assert [path for path, _ in asked] == ["/stats", "/health"]
    assert all(headers["authorization"] == "Bearer secret" for _, headers in asked)
    assert asked[0][1]["accept"] == "application/json"


def test_a_service_behind_a_prefix_is_asked_there(service: FakeService) -> None:
    service.answer = lambda path, headers: (200, {"models": {}}) if path == "/llm/stats" else (404, "")
    with Client(f"{service.url}/llm") as client:
        assert client.stats().models == {}


@pytest.mark.parametrize("proxy", ["http", "socks5"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
async def test_a_service_on_this_machine_is_asked_without_a_proxy(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, host: str, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", f"{proxy}://127.0.0.1:{free_port()}")
    service.answer = lambda path, headers: (200, {"models": {"demo": {"replicas": [llm("a")]}}})
    url = f"http://{host}:{service.port}"
    with Client(url) as client:
        assert list(client.stats().models) == ["demo"]
    async with AsyncClient(url) as other:
        assert list((await other.stats()).models) == ["demo"]
    rows = HTTPClient(url)
    assert len(await rows.replicas() or []) == 1
    await rows.close()


async def test_a_service_on_another_machine_is_asked_through_the_proxy(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", service.url)
    with Client("http://service.invalid") as client:
        assert client.stats().models == {}
    async with AsyncClient("http://service.invalid") as other:
        assert (await other.stats()).models == {}


def test_a_proxy_that_needs_a_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    said = r"http://service\.invalid: .* SOCKS .* socksio.*ALL_PROXY"
    for make in (Client, AsyncClient):
        with pytest.raises(ServiceError, match=f"^{said}"):
            make("http://service.invalid")
    with pytest.raises(RunError, match=f"^--url {said}"):
        HTTPClient("http://service.invalid")


def test_no_service() -> None:
    message = reason(Client(f"http://127.0.0.1:{free_port()}"))
    assert "no service is there" in message
    assert "`saturate serve` starts one" in message


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1, by nobody's authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "certificate.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(private + made.public_bytes(Encoding.PEM))
    return file


async def test_a_certificate_is_trusted_or_named_as_the_reason(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{"models": {}}')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        said = await reasons(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with AsyncClient(url) as client:
            assert (await client.stats()).models == {}
    for message in said:
        assert message.startswith(f"{url}: its certificate is not trusted here (")
        assert "CERTIFICATE_VERIFY_FAILED" in message
        assert message.endswith("SSL_CERT_FILE can name its authority's")


async def test_https_to_a_service_of_http_is_told(service: FakeService) -> None:
    url = f"https://127.0.0.1:{service.port}"
    for message in await reasons(url):
        assert message.startswith(f"{url}: no TLS is spoken there (")
        assert message.endswith("is it http://?")


@pytest.mark.parametrize("url", ["ftp://host", ""])
def test_a_url_of_another_kind(url: str) -> None:
    with pytest.raises(ServiceError, match="must begin with http:// or https://"):
        Client(url)


def test_a_url_that_is_none() -> None:
    with pytest.raises(ServiceError, match=r"http://\[::1: is no URL"):
        Client("http://[::1")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "Not Found"),
        (302, ""),
        (200, "<html>hello</html>"),
        (200, [1, 2]),
        (200, {"object": "list"}),
        (200, {"models": ["demo"]}),
        (200, {"models": {"demo": {"replicas": None}}}),
    ],
)
def test_something_else_that_answers_is_told_from_a_service(
    service: FakeService, status: int, body: Any
) -> None:
    service.answer = lambda path, headers: (status, body)
    message = reason(Client(service.url))
    assert "not as saturate does" in message
    assert "check the port" in message


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_names_the_option(service: FakeService, status: int) -> None:
    service.answer = lambda path, headers: (status, {"error": {"message": "This API key is disabled."}})
    message = reason(Client(service.url, "wrong"))
    assert f"answers {status} (This API key is disabled.)" in message
    assert "--api-key-env NAME" in message
    assert "wrong" not in message


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (429, {"error": {"message": "too many requests"}}, "429 (too many requests)"),
        (503, "", "503 (Service Unavailable)"),
        (500, {"error": None}, "500 (Internal Server Error)"),
    ],
)
def test_a_failure_of_the_service_is_told(service: FakeService, status: int, body: Any, text: str) -> None:
    service.answer = lambda path, headers: (status, body)
    assert text in reason(Client(service.url))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (httpx.ReadTimeout("slow"), "no answer within 10 s"),
        (httpx.RemoteProtocolError(""), "RemoteProtocolError"),
    ],
)
def test_a_connection_that_breaks_is_told(error: Exception, text: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    assert text in reason(Client("http://service", transport=httpx.MockTransport(fail)))


def flaky(*statuses: int) -> tuple[httpx.MockTransport, list[str]]:
    """Return a service that answers these statuses, one after the other; 0 breaks the connection."""
    rest, asked = list(statuses), []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if not (status := rest.pop(0)):
            raise httpx.ReadError("")
        headers = {"retry-after": "7"} if status == 429 else {}
        return httpx.Response(status, json={"error": {"message": "away"}}, headers=headers)

    return httpx.MockTransport(answer), asked


def test_a_call_is_tried_again_and_waits_as_the_service_says() -> None:
    transport, asked = flaky(503, 0, 429, 200)
    waited: list[float] = []
    told: list[str] = []
    retries = Retries(5, Backoff(0.1, 1.0), lambda error: told.append(error.message))
    with Client("http://there", transport=transport, sleep=waited.append) as client:
        assert client.ask("GET", "/x", retries).status_code == 200
    assert len(asked) == 4
    assert len(waited) == len(told) == 3
    assert waited[0] <= 0.1
    assert waited[2] >= 7


@pytest.mark.parametrize(
    ("statuses", "most", "calls"), [((400,), 5, 1), ((503, 503, 503), 2, 3), ((0, 0), 1, 2)]
)
def test_a_call_that_can_not_succeed_fails(statuses: tuple[int, ...], most: int, calls: int) -> None:
    transport, asked = flaky(*statuses)
    with (
        Client("http://there", transport=transport, sleep=lambda seconds: None) as client,
        pytest.raises(ServiceError) as caught,
    ):
        client.ask("GET", "/x", Retries(most))
    assert len(asked) == calls
    assert caught.value.status == (statuses[0] or None)


async def test_the_asynchronous_client_is_the_same() -> None:
    transport, asked = flaky(503, 503, 200)
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async with AsyncClient("http://there/v1", "k", transport=transport, sleep=sleep) as client:
        response = await client.ask("GET", "/x", Retries(2))
    assert response.status_code == 200
    assert (len(asked), len(waited)) == (3, 2)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://llm.example.org/", "https://llm.example.org"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("http://localhost/llm/v1/", "http://localhost/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("llm.example.org", "http://llm.example.org"),
    ],
)
def test_a_slash_and_v1_at_the_end_are_left_out(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", ": must begin with http:// or https://"),
        ("ftp://localhost", "ftp://localhost: must begin with http:// or https://"),
        ("localhost:x", "http://localhost:x: is no URL: "),
        ("http://", "http://: must have a host"),
        ("http:///v1", "http:///v1: must have a host"),
        ("http://h:0", "http://h:0: must have a host, and a port from 1 to 65535 if any"),
        ("http://h:99999", "http://h:99999: is no URL: Port out of range"),
        ("http://h:-1", "http://h:-1: is no URL: "),
        ("http://h:x", "http://h:x: is no URL: "),
        ("http://[::1", "http://[::1: is no URL: "),
        ("http://h\n", "http://h\n: is no URL: "),
        ("http://h?key=1", "http://h?key=1: must have nothing behind the path"),
        ("http://h/v1#top", "http://h/v1#top: must have nothing behind the path"),
    ],
)
def test_what_can_not_be_a_service_is_told(url: str, said: str) -> None:
    with pytest.raises(ValueError) as told:  # noqa: PT011 - the whole message is compared
        base_url(url)
    assert str(told.value).startswith(said)
