"""Malformed requests, half requests and broken connections, which no HTTP library would send."""

import json
import random
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.service import Service
from tests.e2e.waiting import batcher, wait_until_idle
from tests.progress import ANSWER_S, STILL_S

LIMIT_S = STILL_S
PATIENCE_S = 3.0
"""Seconds after which half a request is not answered yet."""

BODY = json.dumps({"prompts": ["What is 1+1?"]}).encode()
STREAM = json.dumps(
    {"model": "demo", "prompt": "once upon", "max_tokens": 1900, "ignore_eos": True, "stream": True}
).encode()
PROMPT = json.dumps({"model": "demo", "prompt": "What is 1+1?", "max_tokens": 8}).encode()
HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
SHORT = b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
GOOD = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


def connect(service: Service) -> socket.socket:
    port = int(service.url.rsplit(":", 1)[1])
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def reset(connection: socket.socket) -> None:
    """Break a connection: the other side gets a reset instead of an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def send(service: Service, data: bytes) -> bytes:
    """Send bytes; return the answer's head and what came with it, or nothing if there is none for a while."""
    answer = b""
    with connect(service) as connection:
        # HAProxy takes a closed half of a connection for a client that has left: so it stays open.
        connection.settimeout(PATIENCE_S)
        try:
            connection.sendall(data)
            while b"\r\n\r\n" not in answer and (piece := connection.recv(65536)):
                answer += piece
        except OSError:
            # The service waits for more, or has closed the connection.
            pass
    return answer


def send_all(service: Service, data: Sequence[bytes]) -> list[bytes]:
    """Send each, many at a time."""
    with ThreadPoolExecutor(50) as pool:
        return list(pool.map(lambda each: send(service, each), data))


def status(answer: bytes) -> int | None:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else None


def old_head(path: str, body: bytes, keep: bool) -> bytes:
    """Return the head of a request of HTTP/1.0."""
    head = b"POST %s HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
        path.encode(),
        len(body),
    )
    return head + (b"connection: keep-alive\r\n\r\n" if keep else b"\r\n")


def read_answer(connection: socket.socket) -> tuple[dict[bytes, bytes], bytes]:
    """Read one answer as a client of HTTP/1.0 does: to its length, or to the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    assert status(data) is not None
    if (length := headers.get(b"content-length")) is not None:
        while len(body) < int(length):
            body += connection.recv(65536)
        assert len(body) == int(length)
        return headers, body
    while piece := connection.recv(65536):
        body += piece
    return headers, body


MALFORMED = {
    "nothing": b"",
    "no request": b"\x00\xff\x16\x03\x01" * 50,
    "tls": bytes.fromhex("160301005a0100005603035f") + b"\0" * 80,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 40,
    "no version": b"GET /\r\n\r\n",
    "odd version": b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
    "no method": b" /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "odd method": b"G\x00T /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\nhost: x\r\n\r\n",
    "odd path": b"GET /\xff\x01 HTTP/1.1\r\nhost: x\r\n\r\n",
    "path that is no utf-8": b"GET /%ff%fe%00 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "long query": b"GET /health?" + b"a" * 10_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "half head": b"GET /health HTTP/1.1\r\nho",
    "header without a colon": b"GET /health HTTP/1.1\r\nhost: x\r\nabc\r\n\r\n",
    "header with a null": b"GET /health HTTP/1.1\r\nhost: x\r\na: \0\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\nconnection: close\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    "length that is no number": HEAD + b"content-length: x\r\n\r\n" + BODY,
    "negative length": HEAD + b"content-length: -1\r\n\r\n" + BODY,
    "two lengths": HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n" + BODY,
    "length and chunks": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "huge length": HEAD + b"content-length: 99999999999999999999\r\n\r\n" + BODY,
    "half body": HEAD + b"content-length: 1000\r\n\r\n" + BODY,
    "more than the length": HEAD + b"connection: close\r\ncontent-length: 5\r\n\r\n" + BODY,
    "odd encoding": HEAD + b"transfer-encoding: cow\r\n\r\n" + BODY,
    "chunk size that is no number": CHUNKED + b"xyz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "negative chunk": CHUNKED + b"-5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "huge chunk": CHUNKED + b"ffffffffffffffffff\r\n" + BODY,
    "chunk that is shorter": CHUNKED + b"ff\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk that is longer": CHUNKED + b"2\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no last chunk": CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n",
    "content encoding": GOOD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"),
    "expectation": GOOD.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"),
    "upgrade": b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    "id that is no text": HEAD + b"x-request-id: \xff\r\n" + SHORT,
    "session that is no text": HEAD + b"x-session-id: \xff\r\n" + SHORT,
    "timeout that is no text": HEAD + b"x-request-timeout-seconds: \xff\r\n" + SHORT,
    "tenant that is no text": HEAD + b"x-tenant: \xff\r\n" + SHORT,
    "content type that is no text": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: \xff\r\n"
    + SHORT,
    "two requests": GOOD.replace(b"connection: close\r\n", b"") + b"GARBAGE\r\n\r\n",
}  # fmt: skip


def test_malformed_requests_are_refused_or_dropped(service: Service) -> None:
    answers = dict(zip(MALFORMED, send_all(service, list(MALFORMED.values())), strict=True))
    assert {name: answer for name, answer in answers.items() if (status(answer) or 0) >= 500} == {}
    # A service that never answers would pass the line above.
    assert sum(status(answer) is not None for answer in answers.values()) > len(MALFORMED) / 2


@pytest.mark.parametrize("keep", [False, True])
def test_a_client_of_http_1_0_gets_whole_answers_with_their_length(service: Service, keep: bool) -> None:
    wrong = b"[]"
    with connect(service) as connection:
        for path, body in [("/generate", BODY), ("/v1/completions", PROMPT), ("/generate", wrong)] * 2:
            connection.sendall(old_head(path, body, keep) + body)
            headers, answer = read_answer(connection)
            assert b"content-length" in headers
            assert b"transfer-encoding" not in headers
            assert ("error" in json.loads(answer)) == (body == wrong)
            if not keep:
                break


@pytest.mark.parametrize("keep", [False, True])
def test_a_client_of_http_1_0_gets_a_stream_without_chunks(service: Service, keep: bool) -> None:
    body = json.dumps(json.loads(PROMPT) | {"stream": True}).encode()
    with connect(service) as connection:
        connection.sendall(old_head("/v1/completions", body, keep) + body)
        headers, answer = read_answer(connection)
    assert b"transfer-encoding" not in headers
    *events, done, end = answer.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


def test_a_head_over_the_limit_is_a_400(service: Service) -> None:
    def padded(size: int) -> bytes:
        return GOOD.replace(b"host: x", b"host: x\r\na: " + b"b" * size)

    assert [status(answer) for answer in send_all(service, [padded(10_000), padded(20_000)])] == [200, 400]


def test_a_request_in_single_bytes_is_answered(service: Service) -> None:
    """The control of these tests: a whole request is answered."""
    pieces = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    pieces += b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    for data in (GOOD, pieces):
        with connect(service) as connection:
            for byte in data:
                connection.sendall(bytes([byte]))
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert status(answer) == 200
        assert b'"results":["2"]' in answer


def test_noise_gets_no_5xx(service: Service, http: httpx.Client) -> None:
    source = random.Random(7)
    noise = []
    for _ in range(300):
        data = bytearray(GOOD)
        for _ in range(source.randint(1, 8)):
            at = source.randrange(len(data))
            match source.randrange(3):
                case 0:
                    data[at] = source.randrange(256)
                case 1:
                    del data[at : at + source.randint(1, 20)]
                case _:
                    data[at:at] = source.randbytes(source.randint(1, 20))
        noise.append(bytes(data))
    answers = send_all(service, noise)
    assert [pair for pair in zip(noise, answers, strict=True) if (status(pair[1]) or 0) >= 500] == []
    assert http.get("/health").status_code == 200


def test_a_connection_may_break_at_every_stage(service: Service, http: httpx.Client) -> None:
    """The request is cut after each of many bytes, by an end or by a reset; later, while it is answered."""
    head = HEAD.replace(b"/generate", b"/v1/completions")
    whole = head + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM
    for end in [*range(0, len(whole), 9), len(whole)]:
        for close in (reset, socket.socket.close):
            connection = connect(service)
            connection.sendall(whole[:end])
            close(connection)
    for wanted in (1, 200, 2000):
        for close in (reset, socket.socket.close):
            connection = connect(service)
            connection.sendall(whole)
            got = 0
            while got < wanted:
                got += len(connection.recv(wanted))
            close(connection)
    # The engine works for none of them any more.
    wait_until_idle(http)


def test_unread_streams_end_when_their_clients_leave(service: Service, http: httpx.Client) -> None:
    head = HEAD.replace(b"/generate", b"/v1/completions")
    connections = [connect(service) for _ in range(20)]
    for connection in connections:
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM)
        connection.recv(1)
    assert batcher(http)["running"] > 0
    assert http.post("/generate", content=BODY, timeout=ANSWER_S).json()["results"] == ["2"]
    for connection in connections:
        reset(connection)
    wait_until_idle(http)


def test_hundreds_of_idle_connections_hold_up_no_request(service: Service, http: httpx.Client) -> None:
    connections = [connect(service) for _ in range(500)]
    for connection in connections[:250]:
        connection.sendall(HEAD)
    assert http.post("/generate", content=BODY, timeout=ANSWER_S).json()["results"] == ["2"]
    for connection in connections:
        connection.close()
