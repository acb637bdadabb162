"""How tokens of many streams travel."""

import asyncio
from typing import Any

import openai

from tests.e2e.service import Service

TOKENS = 100
STREAMS = 40


async def stream(client: openai.AsyncOpenAI, **extra: Any) -> list[str]:
    """Return the pieces of one long answer."""
    chunks = await client.completions.create(
        model="demo",
        prompt="What is 47+28?",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True} | extra,
    )
    return [chunk.choices[0].text async for chunk in chunks if chunk.choices and chunk.choices[0].text]


async def test_whatever_travels_together_no_token_is_lost(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=60) as client:
        alone = await stream(client)
        # The first ones tell how fast the engine is.
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        many = await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        tens = await stream(client, stream_interval=10)
    text = "".join(alone)
    assert text.startswith("75")
    for pieces in [*many, tens]:
        assert "".join(pieces) == text
    # What the client asks for holds; the first token waits for no other.
    assert len(tens) <= TOKENS / 10 + 2
    assert len(alone[0]) == len(tens[0]) == 1
