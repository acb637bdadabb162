"""Errors of a service as the SDKs of OpenAI and Anthropic raise them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.fault_injection import CORE, LIMIT_S
from tests.e2e.service import Service
from tests.e2e.services import is_settled, wait_for_replicas, wait_until
from tests.progress import ANSWER_S

ENGINE = "ServeReplica:llm:Engine:demo"
QUESTION = "What is 47+28?"

TOKENS = 1500
"""Tokens of a stream: seconds of it."""

LONG_TEXT = {"type": "string", "minLength": TOKENS - 100, "maxLength": TOKENS - 50}
"""A schema of an answer that doesn't end before; its route doesn't know `ignore_eos`."""

LATE = {"x-queue-timeout-seconds": "0.000001"}

Texts = AsyncIterator[str]


def conversation() -> Any:
    return [{"role": "user", "content": QUESTION}]


def openai_client(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=ANSWER_S)


def anthropic_client(service: Service) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=service.url, api_key="none", timeout=ANSWER_S)


async def chat(service: Service, **options: Any) -> Texts:
    async with openai_client(service) as client:
        extra = {"ignore_eos": True}
        stream = await client.chat.completions.create(
            model="demo", messages=conversation(), max_tokens=TOKENS, stream=True, extra_body=extra, **options
        )
        async for chunk in stream:
            for choice in chunk.choices:
                yield choice.delta.content or ""


async def completion(service: Service, **options: Any) -> Texts:
    async with openai_client(service) as client:
        extra = {"ignore_eos": True}
        stream = await client.completions.create(
            model="demo", prompt=QUESTION, max_tokens=TOKENS, stream=True, extra_body=extra, **options
        )
        async for chunk in stream:
            for choice in chunk.choices:
                yield choice.text


async def response(service: Service) -> Texts:
    async with openai_client(service) as client:
        text: Any = {"format": {"type": "json_schema", "name": "long", "schema": LONG_TEXT}}
        stream = await client.responses.create(
            model="demo", input=QUESTION, max_output_tokens=TOKENS, stream=True, text=text
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta


async def message(service: Service) -> Texts:
    async with anthropic_client(service) as client:
        extra = {"output_config": {"format": {"type": "json_schema", "schema": LONG_TEXT}}}
        async with client.messages.stream(
            model="demo", messages=conversation(), max_tokens=TOKENS, extra_body=extra
        ) as stream:
            async for text in stream.text_stream:
                yield text


STREAMS: dict[str, tuple[Callable[[Service], Texts], type[Exception]]] = {
    "chat, two answers": (lambda service: chat(service, n=2), openai.APIError),
    "chat, logprobs": (lambda service: chat(service, logprobs=True), openai.APIError),
    "completions, logprobs": (lambda service: completion(service, logprobs=1), openai.APIError),
    "responses": (response, openai.APIError),
    "messages": (message, anthropic.APIStatusError),
}
"""Streams that no other engine can go on with, and the error that the SDK raises."""

WITH_SCHEMA = {"responses", "messages"}


@pytest.mark.long
@pytest.mark.parametrize("victim", [CORE, ENGINE])
async def test_a_stream_whose_engine_is_killed_raises(victim: str, pair: Service) -> None:
    await asyncio.to_thread(wait_until, lambda: is_settled(pair))
    count = len(pair.pids(ENGINE))
    begun = {name: asyncio.Event() for name in STREAMS}

    async def read(name: str) -> str:
        read, expected = STREAMS[name]
        texts = 0
        try:
            async for text in read(pair):
                texts += bool(text)
                if texts:
                    begun[name].set()
        except expected as error:
            return str(error)
        finally:
            # The others don't wait for one that failed at once.
            begun[name].set()
        return f"ended as if it were complete, after {texts} pieces"

    readers: dict[str, asyncio.Task[str]] = {}
    async with asyncio.timeout(LIMIT_S):
        # A stream with a schema waits for its grammar, for longer than another stream takes.
        for names in (WITH_SCHEMA, STREAMS.keys() - WITH_SCHEMA):
            readers |= {name: asyncio.create_task(read(name)) for name in names}
            await asyncio.gather(*(begun[name].wait() for name in names))
        assert [(name, reader.result()) for name, reader in readers.items() if reader.done()] == []
        pair.kill(victim)
        ended = dict(zip(readers, await asyncio.gather(*readers.values()), strict=True))
    print(ended, flush=True)
    # All engines are killed, so a stream that began again on another one has lost it too.
    said = ("engine that had this request failed", "engines failed one after the other")
    assert [text for text in ended.values() if not any(words in text for words in said)] == []
    # Other tests find the pair as it was.
    await asyncio.to_thread(wait_until, lambda: len(pair.pids(CORE)) == count and is_settled(pair))
    await asyncio.to_thread(wait_for_replicas, pair, count)


async def test_a_request_whose_time_is_over_is_not_sent_again(service: Service) -> None:
    async with openai_client(service) as client:
        with pytest.raises(openai.APIStatusError) as late:
            await client.chat.completions.create(model="demo", messages=conversation(), extra_headers=LATE)
    async with anthropic_client(service) as other:
        with pytest.raises(anthropic.APIStatusError) as later:
            await other.messages.create(
                model="demo", messages=conversation(), max_tokens=8, extra_headers=LATE
            )
    for error in (late.value, later.value):
        assert error.status_code == 408
        assert error.response.request.headers["x-stainless-retry-count"] == "0"
