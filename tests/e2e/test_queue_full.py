"""A full queue is answered 429 with the seconds to wait, on every route, streams too."""

import asyncio

import httpx
import openai
import pytest

from tests.e2e.service import Service
from tests.e2e.waiting import batcher, wait_until_idle
from tests.progress import ANSWER_S

ENDLESS = {"model": "demo", "prompt": "once upon", "n": 50, "max_tokens": 1900, "ignore_eos": True}
FLOOD = 150
"""Requests of 50 records each: a hundred of them fill the queue of 5,000."""

TRIES = 10
"""Times that a request is sent at most: the records that run may end at once, and their places are free for a
moment."""

AGAIN_S = 2.0
"""Seconds after which a request of the flood is sent again, so that the place of an answer is taken."""


async def test_a_full_queue(service: Service, http: httpx.Client) -> None:
    wait_until_idle(http)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S, limits=limits) as client:
        answers: list[httpx.Response] = []
        answered = asyncio.Event()

        async def keep_full() -> None:
            while True:
                answers.append(await client.post("/v1/completions", json=ENDLESS))
                answered.set()
                await asyncio.sleep(AGAIN_S)

        flood = [asyncio.ensure_future(keep_full()) for _ in range(FLOOD)]
        await answered.wait()
        assert {answer.status_code for answer in answers} == {429}, answers[0].text
        # Tenants that were active a moment ago have a share of the queue too.
        assert 4000 <= (await asyncio.to_thread(batcher, http))["queue_depth"] <= 5000

        one = {"model": "demo", "prompt": "What is 1+1?"}
        chat = {"model": "demo", "messages": [{"role": "user", "content": "What is 1+1?"}]}
        for path, body in [
            ("/generate", {"prompts": ["What is 1+1?"] * 3}),
            ("/v1/completions", one),
            ("/v1/completions", one | {"stream": True}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"stream": True}),
        ]:
            for _ in range(TRIES):
                response = await client.post(path, json=body)
                if not response.is_success:
                    break
            assert response.status_code == 429, response.text
            assert int(response.headers["retry-after"]) >= 1
            error = response.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert "queue" in error["message"]

        async with openai.AsyncOpenAI(
            # The tenant of the flood: a tenant without waiting requests would be admitted.
            base_url=f"{service.url}/v1",
            api_key="none",
            max_retries=0,
            default_headers={"x-tenant": "default"},
        ) as unmodified:
            with pytest.raises(openai.RateLimitError):
                await unmodified.completions.create(model="demo", prompt="What is 1+1?")

        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await asyncio.to_thread(wait_until_idle, http)
        answer = await client.post("/generate", json={"prompts": ["What is 1+1?"]})
        assert answer.json()["results"] == ["2"]
