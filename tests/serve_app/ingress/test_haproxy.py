"""HAProxy with what Ray Serve has no setting for: a real HAProxy, and a replica here."""

import http.client
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, NamedTuple

import httpx
import pytest

from serve_app.ingress.haproxy import LEAST_CONNECTIONS, connections, open_files, read_limits, with_limits
from tests.serve_app.cli.services import free_port

CONNECTIONS, PER_ADDRESS = 800, 50
TRUSTED = "127.0.0.77"
STALL_S = 20.0
SILENCE_S = 1
"""Seconds after which HAProxy gives a replica up that sends nothing."""


class Replica(BaseHTTPRequestHandler):
    """A replica that answers, dies or hangs, as the path says."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[Counter[str]] = Counter()
    """The requests that came, by path."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.seen[self.path] += 1
        if self.path == "/die":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if self.path == "/hang":
            # Until HAProxy gives it up.
            self.rfile.read(1)
            return
        kind, _, status = self.path.rpartition("-")
        self.send_response(int(status) if kind in ("/own", "/page") else 200)
        if kind == "/page":
            self.send_header("content-type", "text/plain; charset=utf-8")
        self.send_header("content-length", "2")
        # If the replica of a reused connection dies, HAProxy closes the connection of the client.
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        # A connection broke off, as it is meant to.
        pass


class Proxy(NamedTuple):
    """A running HAProxy.

    Attributes:
        port, statistics, metrics: Its ports.
        sockets: Folder of its sockets.
        counted: Gets a line of each request that Ray Serve counts.
    """

    port: int
    statistics: int
    metrics: int
    sockets: Path
    counted: socket.socket

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def running(backend: int, route: str = "/", **variables: str) -> Iterator[Proxy]:
    # A socket's path is short.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as counted,
    ):
        counted.bind(f"{folder}/m.sock")
        proxy = Proxy(free_port(), free_port(), free_port(), Path(folder) / "own", counted)
        environment = {
            "RAY_SERVE_HAPROXY_STATS_PORT": str(proxy.statistics),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(proxy.metrics),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{proxy.sockets}/a.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/m.sock",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/state",
            "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": str(SILENCE_S),
            "RAY_SERVE_HAPROXY_MAXCONN": str(CONNECTIONS),
            "SATURATE_HAPROXY_CONNECTIONS_PER_ADDRESS": str(PER_ADDRESS),
            "SATURATE_HAPROXY_TRUSTED_PROXIES": TRUSTED,
        } | variables
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.serve_app.ingress.proxy_process",
                str(proxy.port),
                str(backend),
                route,
            ],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin
        assert process.stdout
        try:
            assert "ready\n" in iter(process.stdout.readline, "")
            yield proxy
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.fixture(scope="module")
def replica() -> Iterator[int]:
    with Server(("127.0.0.1", 0), Replica) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def proxy(replica: int) -> Iterator[Proxy]:
    with running(replica) as proxy:
        wait_until(lambda: httpx.get(proxy.url).status_code == 200)
        yield proxy


@pytest.fixture(scope="module")
def other(replica: int) -> Iterator[Proxy]:
    """One with an application below a prefix, a second for a request, and open statistics."""
    with running(
        replica,
        "/llm",
        SATURATE_HAPROXY_STATISTICS_HOST="*",
        SATURATE_HAPROXY_REQUEST_TIMEOUT_S="1",
    ) as proxy:
        wait_until(lambda: httpx.get(f"{proxy.url}/llm").status_code == 200)
        yield proxy


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STALL_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def connect(
    stack: ExitStack, port: int, source: str, head: bytes = b"GET / HTTP/1.1\r\nhost: x"
) -> socket.socket:
    """Open a connection from an address, with a part of a request."""
    opened = stack.enter_context(socket.socket())
    opened.settimeout(STALL_S)
    opened.bind((source, 0))
    # HAProxy may close it before the call that connects returns.
    with suppress(OSError):
        opened.connect(("127.0.0.1", port))
        opened.sendall(head)
    return opened


def is_open(opened: socket.socket) -> bool:
    """Return whether HAProxy keeps a connection: it answers the rest of the request."""
    try:
        opened.sendall(b"\r\n\r\n")
        return opened.recv(1024).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def test_an_address_has_its_share_of_the_connections(proxy: Proxy) -> None:
    with ExitStack() as stack:
        opened = [connect(stack, proxy.port, "127.0.0.2") for _ in range(PER_ADDRESS + 20)]
        others = connect(stack, proxy.port, "127.0.0.3")
        assert is_open(others)
        assert sum(map(is_open, opened)) == PER_ADDRESS
    # They count while they are open.
    with ExitStack() as stack:
        wait_until(lambda: is_open(connect(stack, proxy.port, "127.0.0.2")))


def test_a_trusted_proxy_has_more(proxy: Proxy) -> None:
    with ExitStack() as stack:
        opened = [connect(stack, proxy.port, TRUSTED) for _ in range(PER_ADDRESS + 20)]
        assert all(map(is_open, opened))


def test_idle_connections_to_the_statistics_take_none_from_clients(proxy: Proxy) -> None:
    with ExitStack() as stack:
        for port in (proxy.statistics, proxy.metrics):
            for _ in range(CONNECTIONS // 2):
                idle = stack.enter_context(socket.socket())
                idle.setblocking(False)
                # Connections that HAProxy doesn't accept wait in the kernel.
                idle.connect_ex(("127.0.0.1", port))
        start = time.monotonic()
        assert httpx.get(proxy.url, timeout=STALL_S).status_code == 200
        assert time.monotonic() - start < 2.0


def test_statistics_and_metrics_listen_on_loopback_alone(proxy: Proxy) -> None:
    for port, path in ((proxy.statistics, "stats"), (proxy.metrics, "metrics")):
        assert httpx.get(f"http://127.0.0.1:{port}/{path}").status_code == 200
        # Another address of this machine; the service itself is on all of them.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    assert httpx.get(f"http://127.0.0.2:{proxy.port}").status_code == 200


def test_a_setting_opens_the_statistics(other: Proxy) -> None:
    for port, path in ((other.statistics, "stats"), (other.metrics, "metrics")):
        assert httpx.get(f"http://127.0.0.2:{port}/{path}").status_code == 200


def test_other_users_can_reach_no_socket(proxy: Proxy) -> None:
    assert stat.S_IMODE(proxy.sockets.stat().st_mode) == 0o700
    assert stat.S_IMODE((proxy.sockets / "a.sock").stat().st_mode) == 0o600


def error(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status == 503)


def test_errors_of_haproxy_tell_whether_to_come_back(proxy: Proxy) -> None:
    error(httpx.get(f"{proxy.url}/die", timeout=STALL_S), 503)
    error(httpx.get(f"{proxy.url}/hang", timeout=STALL_S), 504)
    # An answer of a replica is its own.
    for status in (404, 500, 502):
        own = httpx.get(f"{proxy.url}/own-{status}")
        assert (own.status_code, own.text) == (status, "ok")


@pytest.mark.parametrize("status", [404, 500, 503])
def test_a_page_of_ray_serve_means_that_no_replica_is_there(proxy: Proxy, status: int) -> None:
    answer = httpx.get(f"{proxy.url}/page-{status}")
    error(answer, 503)
    # The page of a 500 may have a stack.
    assert ("ok" in answer.text) == (status == 503)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_request_that_a_replica_dies_of_is_sent_once(proxy: Proxy, size: int) -> None:
    Replica.seen.clear()
    answer = httpx.post(f"{proxy.url}/die", content=b"x" * size, timeout=STALL_S)
    error(answer, 503)
    assert Replica.seen["/die"] == 1


def test_methods_that_no_route_has_are_refused_and_not_counted(other: Proxy) -> None:
    # The kernel keeps ten lines; more are lost.
    other.counted.setblocking(False)
    with suppress(BlockingIOError):
        while other.counted.recv(8192):
            pass
    other.counted.settimeout(STALL_S)
    for method in ("INVENTED", "PUT", "TRACE"):
        answer = httpx.request(method, f"{other.url}/llm")
        error(answer, 405)
        assert answer.headers["allow"] == "GET, HEAD, POST, DELETE, OPTIONS"
    assert httpx.get(f"{other.url}/llm/last").status_code == 200
    counted = b""
    while b"/llm/last" not in counted:
        counted = other.counted.recv(8192)
        assert not any(method in counted for method in (b"INVENTED", b"PUT", b"TRACE"))


def test_http_2_is_not_spoken_beside_the_limits_of_connections(proxy: Proxy) -> None:
    with ExitStack() as stack:
        settings = bytes.fromhex("000000040000000000")
        opened = connect(stack, proxy.port, "127.0.0.4", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        assert opened.recv(8192).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_does_not_arrive_is_a_408(other: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", other.port, timeout=STALL_S)
    connection.putrequest("POST", "/llm")
    connection.putheader("content-length", "10")
    connection.endheaders()
    answer = connection.getresponse()
    page = httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())
    connection.close()
    error(page, 408)


def test_without_a_replica_the_answer_is_a_503() -> None:
    with running(0) as proxy:
        error(httpx.get(f"{proxy.url}/v1/models"), 503)
    with running(free_port()) as proxy:
        wait_until(lambda: httpx.get(f"{proxy.url}/v1/models").status_code == 503)
        error(httpx.get(f"{proxy.url}/v1/models"), 503)


def test_a_path_of_no_application_is_a_404(other: Proxy) -> None:
    error(httpx.get(f"{other.url}/other"), 404)


def test_connections_are_as_many_as_the_open_files_allow() -> None:
    wanted = {"RAY_SERVE_HAPROXY_MAXCONN": "12000"}
    assert connections(wanted, -1) == connections(wanted, open_files(12_000)) == 12_000
    assert connections(wanted, open_files(9_000)) == 9_000
    assert connections(wanted, 1_024) == LEAST_CONNECTIONS
    assert connections({"RAY_SERVE_HAPROXY_MAXCONN": "500"}, 1_024) == 500
    assert read_limits(wanted, open_files(8_000)).per_address == 2_000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAY_SERVE_HAPROXY_MAXCONN", "many"),
        ("RAY_SERVE_HAPROXY_MAXCONN", "10"),
        ("SATURATE_HAPROXY_CONNECTIONS_PER_ADDRESS", "-1"),
        ("SATURATE_HAPROXY_TRUSTED_PROXIES", "10.0.0.0/8, proxy"),
        ("SATURATE_HAPROXY_STATISTICS_HOST", "x\nbind *:1"),
        ("SATURATE_HAPROXY_REQUEST_TIMEOUT_S", "0"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: "):
        read_limits({name: value})


def test_the_template_of_another_ray_serve_is_refused() -> None:
    with pytest.raises(RuntimeError, match="this version of Ray Serve"):
        with_limits("frontend http_frontend\n", read_limits({}))
