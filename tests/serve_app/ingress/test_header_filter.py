"""Middleware in front of Ray Serve: headers are taken off, and clients of HTTP/1.0 get streams."""

import asyncio
import os
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.headers import Headers
from serve_app.ingress.header_filter import middlewares
from tests.progress import STILL_S


def filtered(app: Any) -> Any:
    """Return an application behind the middleware, as Serve puts it there."""
    for one in reversed(middlewares()):
        app = one.cls(app, *one.args, **one.kwargs)
    return app


async def through(headers: Headers) -> Headers:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    async def unused(*_: Any) -> Any:
        raise AssertionError

    await filtered(app)({"type": "http", "headers": headers}, unused, unused)
    (kept,) = seen
    return list(kept)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what `middlewares` sets."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1")


def test_uvicorn_trusts_the_addresses_of_no_proxy() -> None:
    middlewares()
    assert os.environ["FORWARDED_ALLOW_IPS"] == ""


@pytest.mark.parametrize("value", [b"a", b"7f3-9_x", b"~" * 128])
async def test_a_plain_id_goes_along(value: bytes) -> None:
    headers = [(b"host", b"x"), (b"x-request-id", value)]
    assert await through(headers) == headers


@pytest.mark.parametrize("value", [b"", b"a b", b"a" * 129, b"\xff", "é".encode(), b"a\tb"])
async def test_any_other_id_is_left_out_for_serve_to_make_one(value: bytes) -> None:
    assert await through([(b"x-request-id", value), (b"host", b"x")]) == [(b"host", b"x")]


async def test_there_is_one_id() -> None:
    assert await through([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) == [(b"x-request-id", b"a")]


async def test_no_header_keeps_work_going_without_a_client() -> None:
    assert await through([(b"x-request-disconnect-disabled", b"?1")]) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    b"x-request-id",
                    b"x-request-timeout-seconds",
                    b"x_request-timeout_seconds",
                    b"x-session-id",
                    b"serve-multiplexed-model-id",
                    b"x-tenant",
                ]
            ),
            st.binary(max_size=8),
        )
    )
)
async def test_headers_that_serve_decodes_can_be_decoded_and_the_rest_is_untouched(headers: Headers) -> None:
    kept = await through(headers)
    for name, value in kept:
        if name != b"x-tenant":
            value.decode()
    tenants = [header for header in headers if header[0] == b"x-tenant"]
    assert [header for header in kept if header[0] == b"x-tenant"] == tenants


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream_comes_as_it_is_made_and_its_end_shows(version: bytes) -> None:
    seen = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"a/b")]}
        await send(start)
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await seen.wait()
        await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: 3\n\n"})

    # As in ray.serve._private.http_util.
    server = uvicorn.Server(uvicorn.Config(filtered(app), port=0, lifespan="off", log_config=None))
    serving = asyncio.ensure_future(server._serve())
    async with asyncio.timeout(STILL_S):
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        writer.write(b"GET / HTTP/%b\r\nhost: x\r\nconnection: close\r\n\r\n" % version)
        head = await reader.readuntil(b"\r\n\r\n")
        first = await reader.readuntil(b"data: 1\n\n")
        seen.set()
        rest = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
    chunked = version == b"1.1"
    assert (b"transfer-encoding: chunked" in head) == chunked
    assert (first + rest == b"data: 1\n\ndata: 2\n\ndata: 3\n\n") == (not chunked)
    assert rest.endswith(b"0\r\n\r\n" if chunked else b"data: 3\n\n")
