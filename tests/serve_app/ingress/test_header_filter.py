"""Headers that are taken off before Ray Serve reads them."""

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.headers import Headers
from serve_app.ingress.header_filter import HeaderFilter, middlewares


async def through(headers: Headers) -> Headers:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    async def unused(*_: Any) -> Any:
        raise AssertionError

    kinds: list[Any] = [one.cls for one in middlewares()]
    assert HeaderFilter in kinds
    await HeaderFilter(app)({"type": "http", "headers": headers}, unused, unused)
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
