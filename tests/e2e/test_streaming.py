"""How tokens of many streams travel."""

import asyncio
from typing import Any

import openai

from tests.e2e.service import Service

TOKENS = 200
STREAMS = 40


async def stream(client: openai.AsyncOpenAI, **extra: Any) -> tuple[list[str], list[int]]:
    """Return the pieces of one long answer, and the tokens that they hold."""
    chunks = await client.completions.create(
        model="demo",
        prompt="What is 47+28?",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True} | extra,
    )
    pieces = []
    tokens: list[int] = []
    async for chunk in chunks:
        for choice in chunk.choices:
            pieces += [choice.text] if choice.text else []
            tokens += (choice.model_extra or {}).get("token_ids") or []
    return pieces, tokens


async def test_whatever_travels_together_no_token_is_lost(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=60) as client:
        alone, tokens = await stream(client)
        # How many travel together changes on the way of the first ones.
        first = await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        many = await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        tens, of_tens = await stream(client, stream_interval=10)
    text = "".join(alone)
    assert text.startswith("75")
    assert len(tokens) == TOKENS
    for pieces, held in [*first, *many, (tens, of_tens)]:
        assert "".join(pieces) == text
        assert held == tokens
    # What the client asks for holds; the first token waits for no other.
    assert len(tens) <= TOKENS / 10 + 2
    assert len(alone[0]) == len(tens[0]) == 1
