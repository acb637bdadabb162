"""Routing keys of requests, as the Engine's handle gets them."""

import json
from typing import Any

import pytest

from serve_app.api.token_estimate import EXPECTED_OUTPUT
from serve_app.ingress.prompt_prefix import MAX_BYTES, prefix_hashes
from serve_app.relay.request import RelayRequest
from tests.serve_app.ingress.engine_doubles import CHAT, Client, health

__all__ = ["health"]

LONG = "All work and no play makes Jack a dull boy. " * 40


async def relayed(path: str, body: dict[str, Any]) -> RelayRequest:
    async with Client() as client:
        assert (await client.post(path, json=body)).status_code == 200
        (request,) = client.engine.requests
        return request


def alike(one: RelayRequest, other: RelayRequest) -> int:
    """Return how many hashes two requests begin with alike."""
    pairs = zip(one.prefix, other.prefix, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.prefix), len(other.prefix)))


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", LONG),
        (CHAT, "messages", chat(LONG)),
        ("/v1/responses", "input", LONG),
        ("/v1/messages", "messages", chat(LONG)),
        ("/generate", "prompts", [LONG]),
        ("/generate", "messages", [chat(LONG)]),
    ],
)
async def test_the_prompt_is_hashed_whatever_is_around_it(path: str, field: str, value: object) -> None:
    text = json.dumps(value, separators=(",", ":")).encode()
    assert len(prefix_hashes(text)) == 3
    first = await relayed(path, {field: value, "max_tokens": 5})
    other = await relayed(path, {"model": "demo", "max_tokens": 7, field: value})
    assert first.prefix == other.prefix == prefix_hashes(text)


async def test_what_comes_first_in_the_prompt_is_hashed_first() -> None:
    body = {"messages": chat("Hello"), "system": LONG}
    assert (
        alike(await relayed("/v1/messages", body), await relayed("/v1/messages", {"system": LONG, **body}))
        == 3
    )
    other = {"messages": chat("Hello"), "system": f"Other. {LONG}"}
    assert alike(await relayed("/v1/messages", body), await relayed("/v1/messages", other)) == 0


async def test_the_next_turn_of_a_chat_begins_as_the_one_before() -> None:
    turns = [LONG, "An answer.", "A question."]
    first, second = (
        await relayed(CHAT, {"messages": chat(*turns[:1])}),
        await relayed(CHAT, {"messages": chat(*turns)}),
    )
    assert alike(first, second) == len(first.prefix) == 3


async def test_the_tokens_are_those_of_the_body_and_the_answers() -> None:
    size = len(json.dumps({"prompt": LONG, "max_tokens": 5, "n": 3}, separators=(",", ":")))
    request = await relayed("/v1/completions", {"prompt": LONG, "max_tokens": 5, "n": 3})
    assert request.tokens == size // 4 + 3 * 5
    request = await relayed(CHAT, {"messages": [], "max_completion_tokens": 10**9})
    assert request.tokens == len(request.body) // 4 + EXPECTED_OUTPUT
    request = await relayed("/generate", {"prompts": ["a, b, c", "d"], "max_tokens": 100})
    assert request.tokens == len(request.body) // 4 + 2 * 100


@pytest.mark.parametrize(
    "body", [{}, {"messages": None}, {"prompt": 5}, {"prompt": [1, 2]}, {"messages": "x"}]
)
async def test_a_prompt_of_any_shape_has_a_key(body: dict[str, Any]) -> None:
    assert (await relayed("/v1/completions", body)).prefix == ()


async def test_a_body_that_is_not_json_has_no_prefix() -> None:
    async with Client() as client:
        await client.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"x" * 5_000, "audio/wav")})
        (request,) = client.engine.requests
    assert (request.prefix, request.tokens) == ((), EXPECTED_OUTPUT)


async def test_the_key_of_a_huge_prompt_is_small() -> None:
    request = await relayed("/v1/completions", {"prompt": "x" * (2 * MAX_BYTES)})
    assert len(request.prefix) == 96
