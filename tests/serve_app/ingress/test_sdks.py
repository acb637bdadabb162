"""The clients of OpenAI and Anthropic on an Ingress whose engines fail: they raise, and don't ask again."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
import uvicorn
from ray.exceptions import ActorDiedError

from serve_app.api.errors import RequestError
from tests.progress import STILL_S
from tests.serve_app import answers
from tests.serve_app.answers import LOST, refused
from tests.serve_app.ingress.engine_doubles import STREAM, Engine, answer, application, health

__all__ = ["health"]

LIMIT_S = STILL_S
CHAT: Any = [{"role": "user", "content": "x"}]

Clients = tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]


@asynccontextmanager
async def clients(engine: Engine) -> AsyncIterator[Clients]:
    """Serve an Ingress in front of an engine, and yield both clients with their usual retries."""
    config = uvicorn.Config(application({"demo": engine}), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(LIMIT_S):
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as one,
                anthropic.AsyncAnthropic(base_url=url, api_key="none") as other,
            ):
                yield one, other
    finally:
        server.should_exit = True
        await serving


async def chat(clients: Clients) -> list[str]:
    stream = await clients[0].chat.completions.create(model="demo", messages=CHAT, n=2, stream=True)
    return [chunk.choices[0].delta.content or "" async for chunk in stream]


async def completion(clients: Clients) -> list[str]:
    stream = await clients[0].completions.create(model="demo", prompt="x", logprobs=1, stream=True)
    return [chunk.choices[0].text async for chunk in stream]


async def response(clients: Clients) -> list[str]:
    stream = await clients[0].responses.create(model="demo", input="x", stream=True)
    return [event.delta async for event in stream if event.type == "response.output_text.delta"]


async def message(clients: Clients) -> list[str]:
    manager = clients[1].messages.stream(model="demo", messages=CHAT, max_tokens=8)
    async with manager as stream:
        return [text async for text in stream.text_stream]


def event(name: object = "", **data: Any) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


START = {
    "type": "message_start",
    "message": {
        "id": "a",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "demo",
        "stop_reason": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
}
DELTA = {"type": "response.output_text.delta", "delta": "a", "sequence_number": 4}
RAISED = (openai.APIError, anthropic.APIStatusError)

REFUSED = (openai.APIStatusError, anthropic.APIStatusError)

Ask = Callable[[Clients], Awaitable[list[str]]]


@pytest.mark.parametrize(
    ("ask", "begun"),
    [
        (chat, event(id="a", choices=[{"index": 0, "delta": {"content": "a"}}])),
        (completion, event(id="a", choices=[{"index": 0, "text": "a"}])),
        (response, event(DELTA["type"], **DELTA)),
        (message, event("message_start", **START)),
    ],
    ids=["chat", "completions", "responses", "messages"],
)
async def test_a_stream_whose_engine_dies_raises(ask: Ask, begun: bytes) -> None:
    engine = Engine(answer(answers.message(head=STREAM, body=begun), LOST))
    async with clients(engine) as both:
        with pytest.raises(RAISED, match="engine that had this request"):
            await ask(both)
    assert len(engine.requests) == 1


ASKED: dict[str, Callable[[Clients], Awaitable[Any]]] = {
    "chat": lambda both: both[0].chat.completions.create(model="demo", messages=CHAT),
    "messages": lambda both: both[1].messages.create(model="demo", messages=CHAT, max_tokens=8),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
async def test_a_request_that_three_engines_die_with_is_not_sent_again(ask: Any) -> None:
    engine = Engine(answer(ActorDiedError()))
    async with clients(engine) as both:
        with pytest.raises(
            (openai.InternalServerError, anthropic.InternalServerError), match="not tried again"
        ):
            await ask(both)
        assert len(engine.requests) == 3


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
async def test_a_request_whose_time_is_over_is_not_sent_again(ask: Any) -> None:
    late = RequestError(408, "timeout_error", "The request could not start in the time it allows.")
    engine = Engine(answer(refused(late)))
    async with clients(engine) as both:
        with pytest.raises(
            (openai.APIStatusError, anthropic.APIStatusError), match="could not start"
        ) as caught:
            await ask(both)
    error: Any = caught.value
    assert error.status_code == 408
    assert len(engine.requests) == 1
