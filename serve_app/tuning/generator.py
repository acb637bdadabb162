"""A load generator: it sends requests at a rate or from clients, and notes the times of their answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Self

import httpx

from serve_app.tuning.goals import Goal
from serve_app.tuning.load_step import Answer, Load, Step, is_clear, is_hopeless
from serve_app.tuning.requests import Ask, Requests
from serve_app.tuning.service import Facts, Service

MOST_IN_FLIGHT = 4_096
"""Requests in flight, at most; one that comes beyond them counts as failed."""

POOLS = 16
"""Clients of HTTP that share the connections: one is slow with thousands of them."""

LOOK_S = 0.25
"""Seconds between two looks at a step that runs."""

SETTLE_LOOKS, SETTLE_S = 20, 0.1
"""Looks at the service after a step, until nothing of it runs there, and the seconds between them."""

TAIL = 4_096
"""Bytes at the end of an answer that are kept for its usage."""

ANSWER_S = 600.0
"""Longest silence of an answer, in seconds; a step ends before that."""


class Generator:
    """Puts load steps on a service; an asynchronous context manager.

    An open loop keeps its schedule whatever the service does, and the time of a request counts from when it
    was due. An answer other than 200, one that breaks off and one without a token are failed requests.

    Attributes:
        sent: Requests that were sent so far and not refused.

    Args:
        service: The service, for its URL, its key and its facts.
        requests: Makes the requests.
        goals: The goals.
        most: Most requests in flight.
        sleep: Waits some seconds.
        transport: Another transport, for tests.
    """

    def __init__(
        self,
        service: Service,
        requests: Requests,
        goals: tuple[Goal, ...],
        *,
        most: int = MOST_IN_FLIGHT,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._service = service
        self._requests = requests
        self._goals = goals
        self._most = most
        self._clock = service.clock
        self._sleep = sleep
        self._pools = [
            httpx.AsyncClient(
                base_url=service.url,
                timeout=httpx.Timeout(30.0, read=ANSWER_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                # The pieces of an answer are looked at as they come.
                headers=service.headers | {"accept-encoding": "identity"},
                transport=transport,
            )
            for _ in range(POOLS)
        ]
        self._answers: list[Answer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self._late_s = 0.0
        self.sent = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()
        for pool in self._pools:
            await pool.aclose()

    async def facts(self) -> Facts:
        """Return the facts about the model."""
        return await self._service.facts(self._requests.model)

    async def step(
        self, load: Load, *, seconds: float, warm_up: float, drain: float, seed: int, early: bool = False
    ) -> Step:
        """Put a load on the service; see `tuner.Source`.

        A step that has missed a goal for certain ends before its time. What still runs at the end is cut off.
        """
        self._requests.begin(seed)
        self._answers, self._late_s = [], 0.0
        others = (await self.facts()).in_flight
        began = self._clock()
        window = began + warm_up, began + warm_up + seconds
        expected = load.value * seconds if load.loop == "open" else 0.0
        sender = asyncio.create_task(self._send(load, began, stagger_s=min(warm_up, seconds) / 2))
        cut = False
        try:
            while not sender.done():
                await self._sleep(LOOK_S)
                now = self._clock()
                if load.loop == "closed":
                    expected = self._counted(window) / max(now - window[0], LOOK_S) * seconds
                if now > window[0] and is_hopeless(self._answers, self._goals, window, expected, now):
                    cut = now < window[1]
                    break
                if early and is_clear(load, self._answers, self._goals, window, now):
                    break
                if now >= window[1] and (now >= window[1] + drain or not self._unfinished(window)):
                    break
            if sender.done():
                sender.result()
            now = self._clock()
        finally:
            sender.cancel()
            with suppress(asyncio.CancelledError):
                await sender
            answers = [_copy(each) for each in self._answers]
            await self._end()
        await self._settle(others)
        return Step.of(
            load,
            self._goals,
            answers,
            window,
            began_at=began,
            now=now,
            cut=cut,
            late_s=self._late_s,
        )

    def start(self, clients: int, seed: int) -> None:
        """Start clients that run until the generator is closed, for a load beside another one."""
        self._requests.begin(seed)
        for _ in range(min(clients, self._most)):
            self._spawn(self._client(self._clock()))

    def tokens_between(self, begin: float, end: float) -> float:
        """Return the tokens that answers had between two times on the clock.

        The tokens of an answer are taken to come evenly from its first one to its end.
        """
        total = 0.0
        now = self._clock()
        for answer in self._answers:
            if answer.first_at is None or answer.failed or answer.ended_at is None:
                continue
            last = min(answer.ended_at, now)
            inside = min(last, end) - max(answer.first_at, begin)
            total += answer.tokens * max(0.0, inside) / max(last - answer.first_at, 1e-9)
        return total

    # Sending

    async def _send(self, load: Load, began: float, stagger_s: float) -> None:
        """Send the requests of a load, without end."""
        if load.loop == "closed":
            clients = int(load.value)
            for number in range(clients):
                # Clients that begin at once would stay in step.
                due = began + stagger_s * number / clients
                await self._wait_until(due)
                self._spawn(self._client(self._clock()))
            await asyncio.Event().wait()
        due = began
        while True:
            due += self._requests.gap() / load.value
            await self._wait_until(due)
            answer, ask = self._next(due)
            if len(self._tasks) >= self._most:
                answer.failed, answer.ended_at = True, self._clock()
            else:
                self._spawn(self._call(answer, ask))

    async def _wait_until(self, due: float) -> None:
        now = self._clock()
        # The loop is given a turn every time, so that a rate which is too high blocks nothing.
        await self._sleep(max(0.0, due - now))
        self._late_s = max(self._late_s, self._clock() - due)

    async def _client(self, due: float) -> None:
        while True:
            answer, ask = self._next(due)
            await self._call(answer, ask)
            if answer.failed:
                # A refusal is quick; the next request mustn't come at once.
                await self._sleep(LOOK_S)
            due = self._clock()

    def _next(self, due: float) -> tuple[Answer, Ask]:
        ask = self._requests.next()
        answer = Answer(due, ask.tokens)
        self._answers.append(answer)
        return answer, ask

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, answer: Answer, ask: Ask) -> None:
        """Send a request, and note the times of its answer."""
        self._number += 1
        pool = self._pools[self._number % POOLS]
        self.sent += 1
        try:
            async with pool.stream("POST", ask.path, json=ask.body) as response:
                if response.status_code == 200:
                    answer.tokens = await self._read(answer, response)
                    answer.failed = not answer.tokens
                else:
                    self.sent -= 1
                    answer.failed = True
        except httpx.HTTPError:
            self.sent -= 1
            answer.failed = True
        answer.ended_at = self._clock()

    async def _read(self, answer: Answer, response: httpx.Response) -> int:
        """Read an answer to its end; return its tokens, 0 if it broke off."""
        tail = b""
        async for piece in response.aiter_raw():
            if answer.first_at is None and b'"choices":' in piece:
                answer.first_at = self._clock()
            tail = (tail + piece)[-TAIL:]
        return _tokens(tail) if answer.first_at is not None else 0

    # The end of a step

    def _counted(self, window: tuple[float, float]) -> int:
        return sum(window[0] <= each.sent_at < window[1] for each in self._answers)

    def _unfinished(self, window: tuple[float, float]) -> bool:
        return any(each.ended_at is None and window[0] <= each.sent_at < window[1] for each in self._answers)

    async def _end(self) -> None:
        """Cut off what still runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, others: int) -> None:
        """Wait until nothing of a step runs in the service, but for as many requests of others as before."""
        for _ in range(SETTLE_LOOKS):
            if (await self.facts()).in_flight <= others:
                return
            await self._sleep(SETTLE_S)


def _copy(answer: Answer) -> Answer:
    """Return an answer as it is now: one that is cut off would look as if it had failed."""
    return Answer(answer.sent_at, answer.tokens, answer.first_at, answer.ended_at, answer.failed)


def _tokens(tail: bytes) -> int:
    """Return the tokens of an answer from its last events; 0: it broke off."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {"):
            with suppress(ValueError):
                event = json.loads(line[6:])
                if event.get("error"):
                    return 0
                if usage := event.get("usage"):
                    return int(usage.get("completion_tokens", 0))
            return 0
    return 0
