"""A flood of requests from a process of its own: python -m tests.e2e.flood PORT SECONDS FOLLOW PATIENCE_S.

It measures the capacity of the service, then sends ten times as much for some seconds, from several tenants
and in all tiers, some with a limit on their wait. A share of the refused requests is sent again after the
seconds of Retry-After. The result is printed as JSON.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from batcher.stats import percentiles
from tests.benchmarks.serve.client import Answer, Connections
from tests.progress import ANSWER_S

TOKENS = 128
PEAK_S, CALM_S, DRAIN_S = 4.0, 3.0, 5.0
"""Seconds of the other parts, at least; beside a long flood they are a sixth, a tenth and a fifth of it."""

TIMES = 10
CALM_LOAD = 0.5
"""The load before and after, as a share of the capacity."""

TENANTS = ["greedy"] * 14 + ["a", "b", "c", "d", "e", "f"]
TIERS = ["default"] * 6 + ["flex"] * 3 + ["priority"]
TIMEOUT_S = 1.0

LEAST = 400
"""Requests of a flood, at least: several times as many as can wait, on a slow machine too."""


@dataclass
class Found:
    """The result of a flood; times in seconds.

    Attributes:
        peak: Answers per second that the service can give.
        goodput: Answers per second during the flood, but for its first second.
        statuses: Answers of the flood by status.
        by_tenant: Answers of status 200 by tenant.
        told: Percentiles 0, 50 and 100 of Retry-After.
        retried: Requests that came back during the flood, and `succeeded` those of them that were served.
        returned: Requests that came back after it, and `welcome` those of them that were served.
        late: The longest wait of a request with a limit for its answer 408.
        calm_p95: Before the flood, from request to answer.
        after_p95: The same afterwards, when its queue has ended.
        after_p95_at_once: The same until then.
    """

    peak: float = 0.0
    goodput: float = 0.0
    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    by_tenant: Counter[str] = field(default_factory=Counter)
    told: Sequence[float] = ()
    retried: int = 0
    succeeded: int = 0
    returned: int = 0
    welcome: int = 0
    late: float = 0.0
    calm_p95: float = 0.0
    after_p95: float = 0.0
    after_p95_at_once: float = 0.0


class Flood:
    """Sends requests to a service on this machine."""

    def __init__(self, port: int) -> None:
        self._connections = Connections(port)
        self._draw = random.Random(7)
        self._number = 0

    async def ask(
        self,
        tenant: str = "probe",
        tier: str = "default",
        timeout_s: float | None = None,
        tokens: int = TOKENS,
    ) -> Answer:
        """Send one request and return its answer."""
        self._number += 1
        body = {
            "prompts": [f"{self._number:06} What is 1+1?"],
            "max_tokens": tokens,
            "ignore_eos": True,
            "tenant": tenant,
            "service_tier": tier,
        } | ({} if timeout_s is None else {"queue_timeout_s": timeout_s})
        async with asyncio.timeout(ANSWER_S):
            answer = Answer(tokens, 1, 0.0)
            return await self._connections.post("/generate", json.dumps(body).encode(), answer)

    async def peak(self, clients: int, seconds: float) -> float:
        """Return the answers per second of so many clients that each send one request after the other."""
        ends = time.monotonic() + seconds
        half = ends - seconds / 2
        done = 0

        async def client() -> None:
            nonlocal done
            # Answers of one length would end in step, and a wave more or less would count.
            await self.ask(tokens=self._draw.randint(1, TOKENS))
            while time.monotonic() < ends:
                answer = await self.ask()
                assert answer.status == 200
                done += half <= answer.ended_at < ends

        await asyncio.gather(*(client() for _ in range(clients)))
        return done / (seconds / 2)

    async def steadily(self, rate: float, seconds: float) -> list[Answer]:
        """Send at a rate and return the answers."""
        tasks = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            await asyncio.sleep(self._draw.expovariate(rate))
            tasks.append(asyncio.create_task(self.ask()))
        return [answer for answer in await asyncio.gather(*tasks) if answer.status == 200]

    async def run(self, clients: int, seconds: float, follow: float, patience_s: float) -> Found:
        """Do all of it.

        Args:
            clients: At least as many as the service serves at once.
            seconds: How long the flood lasts.
            follow: Share of the refused requests that are sent again.
            patience_s: The longest Retry-After that is waited for.
        """
        found = Found()
        while not found.peak:
            found.peak = await self.peak(clients, max(PEAK_S, seconds / 6))
        load, calm_s = CALM_LOAD * found.peak, max(CALM_S, seconds / 10)
        found.calm_p95 = _p95(await self.steadily(load, calm_s))
        told: list[float] = []
        done: list[float] = []
        draw = self._draw
        began = time.monotonic()
        ends = began + seconds

        async def one() -> None:
            tenant, tier = draw.choice(TENANTS), draw.choice(TIERS)
            limit = TIMEOUT_S if draw.random() < 0.2 else None
            comes_back = draw.random() < follow
            answer = await self.ask(tenant, tier, limit)
            found.statuses[answer.status] += 1
            if answer.status == 200:
                found.by_tenant[tenant] += 1
                done.append(answer.ended_at)
            elif answer.status == 408:
                found.late = max(found.late, answer.total_s)
            elif answer.status == 429:
                told.append(answer.retry_after_s)
                if comes_back and answer.retry_after_s <= patience_s:
                    await asyncio.sleep(answer.retry_after_s)
                    over = time.monotonic() > ends
                    served = (await self.ask(tenant, tier)).status == 200
                    if over:
                        found.returned += 1
                        found.welcome += served
                    else:
                        found.retried += 1
                        found.succeeded += served

        tasks = []
        while (now := time.monotonic()) < ends or found.sent < LEAST:
            # As many as are due by now: a busy machine must not make the flood smaller.
            due = int((now - began) * TIMES * found.peak) - found.sent
            tasks += [asyncio.create_task(one()) for _ in range(due)]
            found.sent += due
            await asyncio.sleep(0.01)
        found.after_p95_at_once = _p95(await self.steadily(load, max(DRAIN_S, seconds / 5)))
        found.after_p95 = _p95(await self.steadily(load, calm_s))
        await asyncio.gather(*tasks)
        found.goodput = sum(began + 1 <= at < ends for at in done) / (seconds - 1)
        found.told = percentiles(told, (0.0, 0.5, 1.0))
        return found


def _p95(answers: Sequence[Answer]) -> float:
    return percentiles([answer.total_s for answer in answers], (0.95,))[0]


if __name__ == "__main__":
    port, seconds, follow = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    patience_s = float(sys.argv[4])
    found = asyncio.run(Flood(port).run(24, seconds, follow, patience_s))
    print(json.dumps(vars(found)))
