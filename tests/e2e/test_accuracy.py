"""The demo model does its sums, on every route of the service."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import httpx
import openai
import pytest

from serve_app.demo.questions import QUESTIONS_FILE, all_questions
from tests.e2e.service import Service
from tests.progress import ANSWER_S


class Question(NamedTuple):
    prompt: str
    answer: str


Ask = Callable[[list[Question]], Awaitable[list[str]]]
ALL = [Question(question.prompt, question.answer) for question in all_questions()]
SHIPPED = [
    Question(row["prompt"], row["answer"]) for row in map(json.loads, QUESTIONS_FILE.read_text().splitlines())
]

FEW = 100
"""Questions for routes that take them one by one."""


async def share_right(ask: Ask, questions: list[Question], chunk: int, in_flight: int) -> float:
    """Return the share of questions answered right, asked in chunks with a bound on how many at once."""
    limit = asyncio.Semaphore(in_flight)

    async def right(part: list[Question]) -> int:
        async with limit:
            answers = await ask(part)
        return sum(answer == question.answer for answer, question in zip(answers, part, strict=True))

    parts = [questions[start : start + chunk] for start in range(0, len(questions), chunk)]
    return sum(await asyncio.gather(*map(right, parts))) / len(questions)


async def test_generate_answers_sums_and_differences(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:

        async def ask(part: list[Question]) -> list[str]:
            body = {"prompts": [question.prompt for question in part], "temperature": 0}
            results: list[str] = (await client.post("/generate", json=body)).json()["results"]
            return results

        # A part of them has all lengths and both signs.
        assert await share_right(ask, ALL[::37], chunk=100, in_flight=4) >= 0.99


async def test_the_500_questions_in_chunks_of_50_with_10_in_flight(service: Service) -> None:
    assert len(SHIPPED) == 500
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:

        async def ask(part: list[Question]) -> list[str]:
            body = {"prompts": [question.prompt for question in part], "task_id": part[0].prompt}
            answer = (await client.post("/generate", json=body)).json()
            assert answer["task_id"] == part[0].prompt
            results: list[str] = answer["results"]
            return results

        assert await share_right(ask, SHIPPED, chunk=50, in_flight=10) >= 0.99


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_answers_questions(service: Service, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=ANSWER_S) as client:

        async def ask(part: list[Question]) -> list[str]:
            if stream:
                pieces = await client.chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": part[0].prompt}],
                    temperature=0,
                    stream=True,
                )
                return ["".join([piece.choices[0].delta.content or "" async for piece in pieces])]
            answer = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": part[0].prompt}], temperature=0
            )
            return [answer.choices[0].message.content or ""]

        assert await share_right(ask, SHIPPED[:FEW], chunk=1, in_flight=32) >= 0.99


async def test_completions_answer_questions(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=ANSWER_S) as client:

        async def ask(part: list[Question]) -> list[str]:
            prompts = [question.prompt for question in part]
            answer = await client.completions.create(model="demo", prompt=prompts, temperature=0)
            return [choice.text for choice in answer.choices]

        assert await share_right(ask, SHIPPED[:FEW], chunk=25, in_flight=8) >= 0.99
