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


async def test_with_many_streams_tokens_travel_together_and_none_is_lost(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=60) as client:
        alone = await stream(client)
        # The first ones tell how fast the engine is.
        await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        many = await asyncio.gather(*(stream(client) for _ in range(STREAMS)))
        single = await asyncio.gather(*(stream(client, stream_interval=1) for _ in range(STREAMS)))
    text = "".join(alone)
    assert text.startswith("75")
    for pieces in [*many, *single]:
        assert "".join(pieces) == text
    assert sum(map(len, many)) < 0.6 * sum(map(len, single))
    # A first piece waits for no second token.
    assert sum(len(pieces[0]) == 1 for pieces in many) > STREAMS / 2
