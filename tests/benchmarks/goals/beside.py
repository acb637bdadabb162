"""Load generator: live traffic beside batch work on one server."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from batcher.stats import percentiles
from tests.benchmarks.serve.client import Answer, Connections, Request
from tests.benchmarks.serve.loads import INPUT, Prompt, fixed
from tests.benchmarks.serve.ways import chat, completion

CHAT_TOKENS = 16
"""Tokens of an answer of the live traffic."""

BULK_TOKENS = (16, 128)
"""Bounds of the tokens of an answer of the batch work."""

DRAIN_S = 60.0

LENGTHS = f"live: streams, {INPUT} tokens in, {CHAT_TOKENS} out; batch: {INPUT} in, 16 to 128 out"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The load.

    Attributes:
        bulk: Requests of the batch work in flight.
        tiers: Whether the batch work has the tier `flex`.
        rate: Requests per second of the live traffic, Poisson; the rate doubles in the middle of `seconds`.
        warm_up_s: Seconds before the measurement.
        seconds: Seconds of the measurement.
    """

    bulk: int
    tiers: bool = True
    rate: float = 8.0
    warm_up_s: float = 10.0
    seconds: float = 30.0


@dataclass(slots=True)
class Seen:
    """Answers during the measurement.

    Attributes:
        live: Answers of the live traffic.
        bulk_tokens: Output tokens of finished requests of the batch work.
        middle: Time at which the live traffic doubled, on the monotonic clock.
    """

    live: list[Answer] = field(default_factory=list)
    bulk_tokens: int = 0
    middle: float = 0.0

    def figures(self, traffic: Traffic) -> dict[str, float]:
        """Return the figures of the measurement."""
        found = {"bulk_tokens_per_s": self.bulk_tokens / traffic.seconds, "live": float(len(self.live))}
        if self.live:
            ttft = [answer.ttft_s * 1e3 for answer in self.live]
            later = [answer.ttft_s * 1e3 for answer in self.live if answer.sent_at >= self.middle]
            tpot = [answer.tpot_s * 1e3 for answer in self.live]
            ttft_p50, ttft_p99 = percentiles(ttft, (0.5, 0.99))
            tpot_p50, tpot_p99 = percentiles(tpot, (0.5, 0.99))
            (doubled_p99,) = percentiles(later, (0.99,))
            found |= {
                "ttft_p50_ms": ttft_p50,
                "ttft_p99_ms": ttft_p99,
                "ttft_max_ms": max(ttft),
                "ttft_p99_doubled_ms": doubled_p99,
                "tpot_p50_ms": tpot_p50,
                "tpot_p99_ms": tpot_p99,
            }
        return found


async def send(port: int, traffic: Traffic, seed: int) -> Seen:
    """Send the traffic to a server on this machine.

    Args:
        port: The server's port.
        traffic: The load.
        seed: Seed of the prompts; those of two seeds differ, so that none is in a prefix cache.

    Raises:
        RuntimeError: An answer was not a success, or had another number of tokens than requested.
    """
    draw = random.Random(seed)
    numbers = iter(range(seed * 100_000, (seed + 1) * 100_000))
    began = time.monotonic()
    counts_from = began + traffic.warm_up_s
    ends = counts_from + traffic.seconds
    seen = Seen(middle=counts_from + traffic.seconds / 2)
    connections = Connections(port)

    async def ask(request: Request, body: bytes) -> Answer:
        answer = await connections.post(request.path, body, Answer(request.tokens, 1, 0.0))
        answer.check()
        return answer

    async def bulk() -> None:
        while time.monotonic() < ends:
            prompt = Prompt(fixed(next(numbers)).text, draw.randint(*BULK_TOKENS))
            request = completion(prompt)
            extra = {"service_tier": "flex"} if traffic.tiers else {}
            answer = await ask(request, _body(request, extra))
            if counts_from <= answer.ended_at < ends:
                seen.bulk_tokens += answer.tokens

    async def live() -> None:
        request = chat(Prompt(fixed(next(numbers)).text, CHAT_TOKENS))
        answer = await ask(request, _body(request, {}))
        if counts_from <= answer.sent_at:
            seen.live.append(answer)

    tasks = [asyncio.create_task(bulk()) for _ in range(traffic.bulk)]
    while traffic.rate and time.monotonic() < ends:
        rate = traffic.rate * (2 if time.monotonic() >= seen.middle else 1)
        await asyncio.sleep(draw.expovariate(rate))
        tasks.append(asyncio.create_task(live()))
    async with asyncio.timeout(traffic.warm_up_s + traffic.seconds + DRAIN_S):
        await asyncio.gather(*tasks)
    connections.close()
    return seen


def steps_ms(answers: Sequence[Answer]) -> float:
    """Return the engine's median step, in milliseconds: the gap between two tokens of a stream; 0: none."""
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s]
    return percentiles(gaps, (0.5,))[0]


def _body(request: Request, extra: dict[str, Any]) -> bytes:
    return json.dumps(request.body | extra).encode()
