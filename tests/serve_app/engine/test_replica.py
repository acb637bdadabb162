"""What a replica answers as a whole: JSON, or an error in OpenAI's shape."""

import json

import pytest

from serve_app.api.errors import RequestError
from serve_app.engine.replica import answer
from serve_app.relay.asgi import Head


async def test_a_body_is_answered_as_json() -> None:
    async def body() -> bytes:
        return b'{"a": 1}'

    head, text, whole = Head.unpack(await answer(body()))
    assert whole
    assert (head.status, text) == (200, b'{"a": 1}')
    assert head.headers == [(b"content-type", b"application/json")]


async def test_a_refusal_is_answered_with_its_status_and_headers() -> None:
    async def body() -> bytes:
        raise RequestError(429, "rate_limit_error", "full", retry_after_s=2)

    head, text, whole = Head.unpack(await answer(body()))
    assert whole
    assert head.status == 429
    assert (b"retry-after", b"2") in head.headers
    assert json.loads(text)["error"]["message"] == "full"


async def test_any_other_error_is_no_answer() -> None:
    async def body() -> bytes:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await answer(body())
