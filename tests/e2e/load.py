"""A steady load of streams, single answers and lists, with every failure that a client sees."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from serve_app.api.protocol import JSON
from tests.progress import ANSWER_S, MOST_S, STILL_S

PROMPTS = [f"What is {number}+{number + 7}?" for number in range(10, 90, 10)]
TOKENS = 300
"""Tokens of an answer: enough for a stream to be under way when something happens to it."""

LISTS = 4
"""Prompts of a list."""

_answers: dict[str, dict[str, str]] = {}
"""The undisturbed answers, by service: to ask for them takes seconds."""

BODY: JSON = {"model": "demo", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass
class Outcome:
    """The end of one request, as its client saw it.

    Attributes:
        kind: "stream", "single" or "list".
        failure: The reason of a failure; empty for a success.
        begun: The client had received a part of the answer.
        began_at: When it was sent, on the clock of `time.monotonic`.
        seconds: Until its end.
    """

    kind: str
    began_at: float
    failure: str = ""
    begun: bool = False
    seconds: float = 0.0


@dataclass
class Load:
    """Clients that each send one request after the other.

    Attributes:
        url: The service.
        expected: The undisturbed answer to each prompt.
        outcomes: The end of each request.
    """

    url: str
    expected: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def learn(self) -> None:
        """Ask for the answers while nothing disturbs them, unless they are known."""
        if self.url in _answers:
            self.expected = _answers[self.url]
            return
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S) as client:
            for prompt in PROMPTS:
                answer = await client.post("/v1/completions", json=BODY | {"prompt": prompt})
                self.expected[prompt] = answer.json()["choices"][0]["text"]
        _answers[self.url] = self.expected

    @asynccontextmanager
    async def running(self, streams: int = 4, singles: int = 2, lists: int = 1) -> AsyncIterator[None]:
        """Send requests until the block ends; those under way are then waited for."""
        stop = asyncio.Event()
        clients = [self._stream] * streams + [self._single] * singles + [self._list] * lists
        tasks = [asyncio.create_task(self._client(ask, number, stop)) for number, ask in enumerate(clients)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def wait_for(self, count: int, still_s: float = STILL_S) -> None:
        """Wait until so many more requests have ended well, at most `still_s` for the end of each."""
        wanted = self.good + count
        async with asyncio.timeout(MOST_S):
            while self.good < wanted:
                self._ended.clear()
                async with asyncio.timeout(still_s):
                    await self._ended.wait()

    @property
    def good(self) -> int:
        return sum(not outcome.failure for outcome in self.outcomes)

    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failure]

    def summary(self) -> str:
        """Return the counts: requests, and failures by what they are."""
        found = Counter(
            f"{one.kind}: {one.failure} ({'begun' if one.begun else 'nothing yet'})"
            for one in self.failures()
        )
        slowest = max((one.seconds for one in self.outcomes), default=0.0)
        counts = f"{len(self.outcomes)} requests, {len(self.failures())} failed {dict(found)}"
        return f"{counts}, slowest {slowest:.1f} s"

    async def _client(
        self,
        ask: Callable[[httpx.AsyncClient, int, Outcome], Awaitable[None]],
        number: int,
        stop: asyncio.Event,
    ) -> None:
        # A connection each: the break of one leaves the others.
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S) as client:
            while not stop.is_set():
                outcome = Outcome(ask.__name__.strip("_"), time.monotonic())
                try:
                    await ask(client, number, outcome)
                except httpx.HTTPError as error:
                    outcome.failure = type(error).__name__
                outcome.seconds = time.monotonic() - outcome.began_at
                self.outcomes.append(outcome)
                self._ended.set()
                number += 1
                # A client that is refused at once does not flood the service.
                await asyncio.sleep(0.2 if outcome.failure else 0)

    async def _single(self, client: httpx.AsyncClient, number: int, outcome: Outcome) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        answer = await client.post("/v1/completions", json=BODY | {"prompt": prompt})
        if answer.status_code != 200:
            outcome.failure = f"status {answer.status_code}"
        elif answer.json()["choices"][0]["text"] != self.expected[prompt]:
            outcome.failure = "another text"

    async def _list(self, client: httpx.AsyncClient, number: int, outcome: Outcome) -> None:
        prompts = [PROMPTS[(number + offset) % len(PROMPTS)] for offset in range(LISTS)]
        answer = await client.post("/generate", json=BODY | {"prompts": prompts})
        if answer.status_code != 200:
            outcome.failure = f"status {answer.status_code}"
        elif answer.json()["results"] != [self.expected[prompt] for prompt in prompts]:
            outcome.failure = "another text"

    async def _stream(self, client: httpx.AsyncClient, number: int, outcome: Outcome) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        body = BODY | {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                outcome.failure = f"status {answer.status_code}"
                return
            # Its head comes with its first event.
            outcome.begun = True
            lines = [line async for line in answer.aiter_lines()]
            events = [line.removeprefix("data: ") for line in lines if line]
            outcome.failure = self._judge(events, prompt)

    def _judge(self, events: list[str], prompt: str) -> str:
        """Return the failure of a stream that ended as HTTP demands; empty for none."""
        done = events[-1:] == ["[DONE]"]
        read: list[JSON] = [json.loads(event) for event in events if event != "[DONE]"]
        if any("error" in event for event in read):
            return "an error event, then [DONE]" if done else "an error event"
        if not done:
            return "an end without [DONE] or an error"
        text = "".join(choice["text"] for event in read for choice in event["choices"])
        if text != self.expected[prompt]:
            return "another text"
        finishes = [choice["finish_reason"] for event in read for choice in event["choices"]]
        if finishes[-1] != "length" or any(finishes[:-1]):
            return "a wrong finish_reason"
        if len({(event["id"], event["created"]) for event in read}) != 1:
            return "several ids"
        if read[-1]["usage"]["completion_tokens"] != TOKENS:
            return "a wrong usage"
        return ""
