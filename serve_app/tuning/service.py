"""A running service, as the measurement of a profile uses it: its facts, and streams of tokens."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import httpx
from pydantic import BaseModel

from serve_app.api.validation import FEW, suggestion
from serve_app.client import AsyncClient, ServiceError

TOKENS = range(33, 127)
"""Token ids of prompts: every vocabulary has them, and few tokenizers have special ones among them."""

TIMEOUT_S = 120.0
"""Longest silence of the service; a model with 0 replicas is loaded in this time, or not measured."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a service says about a model.

    Attributes:
        model: Its id.
        max_model_len: Tokens of its context.
        replicas: Its replicas.
        kv_tokens: Tokens that may be in flight on a replica.
        max_num_seqs: Requests that may run on a replica.
        in_flight: Requests that run or wait on any replica.
        submitted: Requests that its replicas have taken so far.
    """

    model: str
    max_model_len: int
    replicas: int
    kv_tokens: int
    max_num_seqs: int
    in_flight: int
    submitted: int


@dataclass(slots=True)
class Stream:
    """An answer, by the times at which its tokens came.

    Attributes:
        prompt: Tokens of its prompt.
        sent_at: When it was sent, in seconds on the clock.
        tokens: The number of tokens so far, by the time at which each piece came.
    """

    prompt: int
    sent_at: float
    tokens: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0][0] - self.sent_at


class _Count(BaseModel):
    """The answer to `/tokenize`."""

    count: int


class Service:
    """A service behind a URL; an asynchronous context manager.

    Attributes:
        url: Its base URL, without a slash at its end.
        clock: Returns the time in seconds.
        headers: Headers with the API key; empty: there is none.

    Args:
        url: Its base URL; `/v1` at its end is left out.
        api_key: Sent as a bearer token.
        seed: Of the random prompts, which are in no prefix cache; None: another one each time.
        clock: Returns the time in seconds.
        transport: Another transport, for tests.

    Raises:
        ServiceError: The URL is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = AsyncClient(
            url, api_key, timeout=httpx.Timeout(10.0, read=TIMEOUT_S), transport=transport
        )
        self.url = self._client.url
        self.clock = clock
        self.headers = self._client.headers
        self._numbers = random.Random(seed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()

    async def find(self, model: str | None) -> str:
        """Return the id of the model to measure.

        Args:
            model: The id; None: the only language model.

        Raises:
            ServiceError: There is no service, or no such model, or several without a choice.
        """
        cards = await self._client.cards()
        names = [card.id for card in cards if card.kind == "llm" and not card.parent]
        if not names:
            raise ServiceError(f"{self.url}: it serves no language model that this key may use")
        if model is None and len(names) > 1:
            shown = ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
            raise ServiceError(f"{self.url}: it serves several models; choose with --model: {shown}")
        if model is not None and model not in names:
            raise ServiceError(f"{self.url}: it has no model {model!r}{suggestion(model, names)}")
        return model or names[0]

    async def count_tokens(self, model: str, text: str) -> int:
        """Return the tokens of a text, by the model's own tokenizer.

        Raises:
            ServiceError: The service doesn't answer, or not as saturate does.
        """
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._client.read(await self._client.ask("POST", "/tokenize", json=body), _Count).count

    async def facts(self, model: str) -> Facts:
        """Return the facts about a model.

        Raises:
            ServiceError: The service doesn't answer, or not as saturate does.
        """
        card = next((card for card in await self._client.cards() if card.id == model), None)
        report = (await self._client.stats()).models.get(model)
        if report is None or report.error or not report.replicas:
            reason = (report and report.error) or "it has no replica"
            raise ServiceError(f"{self.url}: /stats has nothing about {model}: {reason}")
        batchers = [replica.window for replica in report.replicas]
        known = [batcher for batcher in batchers if batcher is not None]
        if len(known) < len(batchers):
            raise self._client.foreign(f"/stats lacks the batcher of a replica of {model}")
        return Facts(
            model=model,
            max_model_len=(card and card.max_model_len) or 0,
            replicas=len(known),
            kv_tokens=min(each.capacity for each in known),
            max_num_seqs=min(each.max_running or each.capacity for each in known),
            in_flight=sum(each.running + each.queue_depth for each in known),
            submitted=sum(each.total_submitted for each in known),
        )

    async def streams(self, model: str, prompts: Sequence[int], tokens: int) -> list[Stream]:
        """Send requests at once, and return their answers.

        Args:
            model: The model.
            prompts: Tokens of each prompt.
            tokens: Tokens of each answer.

        Raises:
            ServiceError: One of them failed.
        """
        return list(await asyncio.gather(*(self._stream(model, prompt, tokens) for prompt in prompts)))

    async def _stream(self, model: str, prompt: int, tokens: int) -> Stream:
        body = {
            "model": model,
            "prompt": self._numbers.choices(TOKENS, k=prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            # A piece may have several tokens; their number is in it.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        stream = Stream(prompt, self.clock())
        try:
            async with self._client.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._client.refusal(response)
                async for line in response.aiter_lines():
                    self._read(stream, line)
        except httpx.HTTPError as error:
            raise self._client.unreachable(error) from None
        if not stream.tokens or stream.tokens[-1][1] != tokens:
            seen = stream.tokens[-1][1] if stream.tokens else 0
            raise ServiceError(f"{self.url}: an answer had {seen} tokens in place of {tokens}")
        return stream

    def _read(self, stream: Stream, line: str) -> None:
        """Take in a line of a stream."""
        if not line.startswith("data: {"):
            return
        now = self.clock()
        try:
            event = json.loads(line[6:])
        except ValueError:
            raise self._client.foreign("an event of a stream is no JSON") from None
        if error := event.get("error"):
            raise ServiceError(f"{self.url}: an answer broke off: {error.get('message', error)}")
        if event.get("choices"):
            seen = stream.tokens[-1][1] if stream.tokens else 0
            count = (event.get("usage") or {}).get("completion_tokens", seen + 1)
            if count > seen:
                stream.tokens.append((now, count))
