"""Load generator: live streams beside batch rows on one server."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batcher.stats import percentiles
from tests.benchmarks.measuring import Row
from tests.benchmarks.serve.client import Answer, Connections
from tests.benchmarks.serve.loads import Prompt, text
from tests.benchmarks.serve.ways import chat, completion

LIVE_IN, LIVE_OUT = 256, 64
"""Tokens of a live request, and of its answer."""

TEMPLATE = 3
"""Tokens that the chat template of the demo model adds to a text."""

WARM_UP_S = 15.0

DRAIN_S = 120.0
"""Most seconds from the end of a measurement until the last live answer."""

NUMBERS = 100_000
"""Most prompts of one run."""

TTFT_P99, TPOT_P99, TOKENS, LIVE = "live: TTFT p99", "live: TPOT p99", "rows: tokens/s", "live: requests"


@dataclass(frozen=True, slots=True)
class Rows:
    """Batch rows in a closed loop.

    Attributes:
        in_flight: Rows in flight.
        prompt: Tokens of a prompt.
        answer: Mean tokens of an answer: uniform from half of the mean to one and a half.
        extra: Fields of the body by which the server knows a row.
    """

    in_flight: int
    prompt: int
    answer: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The load.

    Attributes:
        rate: Live requests per second, Poisson; 0: none.
        rows: The batch rows; None: none.
        seconds: Seconds of the measurement.
        warm_up_s: Seconds before, with the same load.
    """

    rate: float
    rows: Rows | None
    seconds: float
    warm_up_s: float = WARM_UP_S

    def arrivals(self) -> list[float]:
        """Return when live requests are sent, in seconds from the start; those below `warm_up_s` don't count.

        Poisson arrivals, given how many there are: `rate` times `seconds` count in each run. All runs have
        the same ones.
        """
        draw = random.Random("live")
        found = []
        for start, seconds in ((0.0, self.warm_up_s), (self.warm_up_s, self.seconds)):
            count = round(self.rate * seconds)
            found += sorted(start + draw.uniform(0.0, seconds) for _ in range(count))
        return found


@dataclass(slots=True)
class Seen:
    """Answers that count.

    Attributes:
        seconds: Seconds of the measurement.
        live: Answers to live requests that were sent in it, in the order of sending.
        tokens: Output tokens of rows that ended in it.
    """

    seconds: float
    live: list[Answer] = field(default_factory=list)
    tokens: int = 0

    def figures(self) -> list[Row]:
        """Return the figures; without live requests those of the rows alone."""
        found = []
        if self.live:
            ttft = [answer.ttft_s * 1e3 for answer in self.live]
            tpot = [answer.tpot_s * 1e3 for answer in self.live]
            p50, p90, p99 = percentiles(ttft, (0.5, 0.9, 0.99))
            tpot_p50, tpot_p99 = percentiles(tpot, (0.5, 0.99))
            found += [
                Row(LIVE, "", [len(ttft)]),
                Row("live: TTFT p50", "ms", [p50]),
                Row("live: TTFT p90", "ms", [p90]),
                Row(TTFT_P99, "ms", [p99]),
                Row("live: TTFT max", "ms", [max(ttft)]),
                Row("live: TPOT p50", "ms", [tpot_p50]),
                Row(TPOT_P99, "ms", [tpot_p99]),
            ]
        if self.tokens:
            found.append(Row(TOKENS, "tokens/s", [self.tokens / self.seconds]))
        return found


async def send(port: int, traffic: Traffic, seed: int, headers: Sequence[str] = ()) -> Seen:
    """Send the traffic to a server on this machine.

    Rows are sent until the last live request is answered, so that no live request has a calmer engine.

    Args:
        port: The server's port.
        traffic: The load.
        seed: Seed of the prompts; those of two seeds differ, so that none is in a prefix cache.
        headers: A further header line for each live request that counts, in their order; none: none.

    Raises:
        RuntimeError: An answer was not a success, or had another number of tokens than requested.
        ConnectionError: The server closed a connection within an answer.
        TimeoutError: Live requests were not answered in time.
    """
    draw = random.Random(seed)
    numbers = itertools.count(seed * NUMBERS)
    began = time.monotonic()
    counts_from = began + traffic.warm_up_s
    ends = counts_from + traffic.seconds
    seen = Seen(traffic.seconds)
    connections = Connections(port)
    lines = iter(headers)

    async def row(rows: Rows) -> None:
        while True:
            tokens = round(rows.answer * draw.uniform(0.5, 1.5))
            request = completion(Prompt(text(next(numbers), rows.prompt), tokens))
            body = json.dumps(request.body | rows.extra).encode()
            answer = await connections.post(request.path, body, Answer(tokens, 1, 0.0))
            answer.check()
            if counts_from <= answer.ended_at < ends:
                seen.tokens += tokens

    async def stream(counts: bool) -> None:
        request = chat(Prompt(text(next(numbers), LIVE_IN - TEMPLATE), LIVE_OUT))
        line = next(lines, "") if counts else ""
        answer = Answer(LIVE_OUT, 1, 0.0)
        if counts:
            seen.live.append(answer)
        await connections.post(request.path, json.dumps(request.body).encode(), answer, line)
        answer.check()

    async def live() -> None:
        try:
            async with asyncio.TaskGroup() as streams:
                for at in traffic.arrivals():
                    await asyncio.sleep(began + at - time.monotonic())
                    streams.create_task(stream(at >= traffic.warm_up_s))
                await asyncio.sleep(ends - time.monotonic())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    running = [asyncio.create_task(live())]
    if traffic.rows:
        running += [asyncio.create_task(row(traffic.rows)) for _ in range(traffic.rows.in_flight)]
    limit = traffic.warm_up_s + traffic.seconds + DRAIN_S
    try:
        ended, _ = await asyncio.wait(running, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if not ended:
            raise TimeoutError(f"live requests are not answered {DRAIN_S:g} s after the measurement")
        for task in ended:
            task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        connections.close()
    return seen
