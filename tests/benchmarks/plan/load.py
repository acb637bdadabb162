"""Load on a service: its requests, the generator that sends them, and what their answers say about goals."""

import asyncio
import math
import random
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from batcher.stats import percentiles
from serve_app.api.protocol import JSON
from serve_app.client import ServiceError
from serve_app.tuning.goals import METRICS, Goal, Metric
from serve_app.tuning.service import TOKENS, LoadAnswer, LoadRequest, ModelFacts, Service
from serve_app.tuning.workload import Arrival, TokenLengths
from serve_app.wire.usage import Tokens

Loop = Literal["open", "closed"]

Prompt = str | list[JSON]
"""A text to complete, or the messages of a chat."""

BEGINNING = "beginning"
"""Seed of the text with which cached prompts begin: the same in all steps."""

CLOSE = 2.0
"""Largest ratio of the share of requests that miss a goal to the allowed share, or its inverse, for which a
step is unclear."""

CLOSE_DEVIATIONS = 4.0
"""Largest distance of these shares for which a step is unclear, in standard deviations of independent
requests; requests in groups have more than one."""

GROWTH, GROWTH_DEVIATIONS = 1.3, 3.0
"""A service falls behind if the requests in flight of a step's last third exceed those of its first third
by this factor, and by this many standard deviations of a Poisson number."""

CERTAIN, CERTAIN_MORE = 2.0, 3
"""A step ends early when misses exceed this factor times the allowed number, plus 3."""

MOST_IN_FLIGHT = 4_096
"""Most requests in flight; a request beyond them counts as failed."""

LOOK_S = 0.25
"""Seconds between two looks at a running step."""

SETTLE_LOOKS, SETTLE_S = 20, 0.1
"""Looks at the service after a step, until none of its requests runs there, and the seconds between them."""


class LoadLevel(NamedTuple):
    """A load.

    Attributes:
        loop: "open": requests come at a rate, at random times, independently of the answers (Poisson).
            "closed": clients, each of which sends the next request when it has the answer to the last one.
        value: Requests per second, or clients.
    """

    loop: Loop
    value: float

    def __str__(self) -> str:
        if self.loop == "open":
            return f"{self.value:.4g} requests/s"
        return f"{self.value:g} client" + ("" if self.value == 1 else "s")


# Requests


@dataclass(slots=True)
class Requests:
    """Makes requests, the same for a seed.

    Attributes:
        model: The model.
        input: Tokens of a prompt; not used with a dataset.
        output: Tokens of an answer. Each answer has the tokens that its request asks for, except with a
            dataset, where it may end before.
        prompts: Prompts of a dataset, taken in random order, again and again; empty: random token ids, of
            which no beginning is in the prefix cache.
        calls: Tokens of calls, of which each request takes those of a random one, in place of `input` and
            `output`. The tokens of its prompt that were in the prefix cache are the beginning of one text.
        tier: The `service_tier` of the requests.
    """

    model: str
    input: TokenLengths
    output: TokenLengths
    prompts: Sequence[Prompt] = ()
    calls: Sequence[Tokens] = ()
    tier: str = "default"
    _numbers: random.Random = field(default_factory=random.Random)
    _left: list[Prompt] = field(default_factory=list)
    _beginning: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.calls:
            most = max(call.cached for call in self.calls)
            self._beginning = random.Random(BEGINNING).choices(TOKENS, k=most)

    def begin(self, seed: int) -> None:
        """Begin with the requests of a seed."""
        self._numbers = random.Random(seed)
        self._left = []

    def gap(self) -> float:
        """Return the time to the next request, as a multiple of the mean."""
        return self._numbers.expovariate(1.0)

    def arrivals(self, rate: float, seed: int) -> Iterator[Arrival]:
        """Yield the arrivals of an open loop for this seed, endlessly; this object's state stays.

        Args:
            rate: Requests per second.
            seed: The seed.

        Raises:
            ValueError: The prompts are those of a dataset, whose lengths in tokens only the service knows.
        """
        if self.prompts:
            raise ValueError("the lengths of a dataset's prompts aren't known; take random prompts (input)")
        copy = Requests(self.model, self.input, self.output, calls=self.calls)
        copy.begin(seed)
        at = 0.0
        while True:
            at += copy.gap() / rate
            ask = copy.next()
            yield Arrival(at, len(ask.body["prompt"]), ask.tokens)

    def next(self) -> LoadRequest:
        """Return the next request."""
        call = self._numbers.choice(self.calls) if self.calls else None
        tokens = self.output.draw(self._numbers) if call is None else call.output
        body: JSON = {
            "model": self.model,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_tier": self.tier,
        }
        if not self.prompts:
            if call is None:
                prompt = self._numbers.choices(TOKENS, k=self.input.draw(self._numbers))
            else:
                # The last token is always computed.
                cached = min(call.cached, call.prompt - 1)
                own = self._numbers.choices(TOKENS, k=call.prompt - cached)
                prompt = self._beginning[:cached] + own
            return LoadRequest("/v1/completions", body | {"prompt": prompt, "ignore_eos": True}, tokens)
        if not self._left:
            self._left = self._numbers.sample(self.prompts, len(self.prompts))
        text = self._left.pop()
        if isinstance(text, str):
            return LoadRequest("/v1/completions", body | {"prompt": text}, tokens)
        return LoadRequest("/v1/chat/completions", body | {"messages": text}, tokens)


# A step


@dataclass(frozen=True, slots=True)
class LoadStep:
    """Requests under one load.

    Attributes:
        load: The load.
        goals: The goals.
        samples: Seconds of each metric, ascending; infinite for failed requests. A request that was cut off
            at the end of the step has the time until then, if that breaks a goal already.
        sent: Requests that count: those that were sent in the window.
        good: Requests within all bounds.
        failed: Requests that were refused or failed.
        seconds: Length of the window.
        spent_s: Time of the whole step, with its warm-up and its end.
        ended: Answers that ended in the window.
        tokens: Their tokens.
        in_flight: Mean number of requests in flight.
        peak: Number of requests in flight that was exceeded in 1% of the time.
        growing: The number of requests in flight grew: the service can't keep up.
        cut: The step was ended before its time, since too many requests had missed a goal.
        late_s: The longest time by which a request was sent too late.
    """

    load: LoadLevel
    goals: tuple[Goal, ...]
    samples: dict[Metric, list[float]]
    sent: int
    good: int
    failed: int
    seconds: float
    spent_s: float
    ended: int
    tokens: int
    in_flight: float
    peak: int
    growing: bool
    cut: bool
    late_s: float = 0.0

    @classmethod
    def of(
        cls,
        load: LoadLevel,
        goals: tuple[Goal, ...],
        answers: Sequence[LoadAnswer],
        window: tuple[float, float],
        *,
        began_at: float,
        now: float,
        cut: bool = False,
        late_s: float = 0.0,
    ) -> "LoadStep":
        """Return the step that some requests make.

        Args:
            load: The load.
            goals: The goals.
            answers: All requests, those of the warm-up too.
            window: Begin and end of the time in which requests count.
            began_at: When the step began.
            now: When the step ended.
            cut: Whether it was ended before its time.
            late_s: The longest time by which a request was sent too late.
        """
        begin, end = window[0], min(window[1], now)
        counted = [each for each in answers if begin <= each.sent_at < end]
        bounds = {
            metric: min((goal.bound for goal in goals if goal.metric == metric), default=math.inf)
            for metric in METRICS
        }
        samples: dict[Metric, list[float]] = {metric: [] for metric in METRICS}
        for answer in counted:
            for metric, bound in bounds.items():
                found = answer.seconds(metric, now)
                if found is not None and (found[1] or found[0] >= bound):
                    samples[metric].append(found[0])
        ended = [
            each
            for each in answers
            if not each.failed and each.ended_at is not None and begin <= each.ended_at < end
        ]
        thirds, peak = _in_flight(answers, begin, end, now)
        first, last = thirds[0], thirds[-1]
        return cls(
            load=load,
            goals=goals,
            samples={metric: sorted(values) for metric, values in samples.items()},
            sent=len(counted),
            good=sum(not any(_missed(each, goal, now) for goal in goals) for each in counted),
            failed=sum(each.failed for each in counted),
            seconds=end - begin,
            spent_s=now - began_at,
            ended=len(ended),
            tokens=sum(each.tokens for each in ended),
            in_flight=sum(thirds) / len(thirds),
            peak=peak,
            # The number of clients of a closed loop is fixed.
            growing=load.loop == "open" and last > GROWTH * first + GROWTH_DEVIATIONS * math.sqrt(first),
            cut=cut,
            late_s=late_s,
        )

    def merged(self, other: "LoadStep") -> "LoadStep":
        """Return this step and another step under the same load as one step."""
        seconds = self.seconds + other.seconds
        flight = self.in_flight * self.seconds + other.in_flight * other.seconds
        return replace(
            self,
            samples={metric: sorted([*self.samples[metric], *other.samples[metric]]) for metric in METRICS},
            sent=self.sent + other.sent,
            good=self.good + other.good,
            failed=self.failed + other.failed,
            seconds=seconds,
            spent_s=self.spent_s + other.spent_s,
            ended=self.ended + other.ended,
            tokens=self.tokens + other.tokens,
            in_flight=flight / max(seconds, 1e-9),
            peak=max(self.peak, other.peak),
            # One step that grows may be chance; two are not.
            growing=self.growing and other.growing,
            cut=self.cut or other.cut,
            late_s=max(self.late_s, other.late_s),
        )

    @property
    def misses(self) -> tuple[Goal, ...]:
        """Goals that don't hold."""
        return tuple(goal for goal in self.goals if self.missing(goal) > goal.allowed)

    @property
    def holds(self) -> bool:
        """Whether all goals hold, and the service keeps up."""
        return bool(self.sent) and not self.misses and not self.growing and not self.cut

    @property
    def unclear(self) -> bool:
        """Whether another step might say something else."""
        if self.cut or not self.sent:
            return False
        if self.growing:
            return not self.misses
        return any(self._is_close(goal) for goal in self.goals)

    def _is_close(self, goal: Goal) -> bool:
        share, most = self.missing(goal), goal.allowed
        chance = CLOSE_DEVIATIONS * math.sqrt(most * (1 - most) / self.sent)
        return most / CLOSE <= share <= most * CLOSE and abs(share - most) <= chance

    @property
    def goodput(self) -> float:
        """Requests per second within all bounds."""
        return self._per_s(self.good)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self._per_s(self.sent)

    @property
    def ended_per_s(self) -> float:
        """Requests per second that were answered."""
        return self._per_s(self.ended)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second."""
        return self._per_s(self.tokens)

    def _per_s(self, number: float) -> float:
        return number / self.seconds if self.seconds else 0.0

    def missing(self, goal: Goal) -> float:
        """Return the share of requests that miss a goal's bound, 0 to 1."""
        values = self.samples[goal.metric]
        return 1 - bisect_left(values, goal.bound) / len(values) if values else 0.0

    def figure(self, metric: Metric, percentile: int) -> float:
        """Return a percentile of a metric in seconds, by nearest rank; NaN: there is none."""
        values = self.samples[metric]
        return percentiles(values, [percentile / 100])[0] if values else math.nan

    def median(self, metric: Metric) -> float:
        """Return the median of a metric in seconds; 0 where there is none, or where it is infinite."""
        value = self.figure(metric, 50)
        return value if math.isfinite(value) else 0.0


def is_hopeless(
    answers: Iterable[LoadAnswer],
    goals: Iterable[Goal],
    window: tuple[float, float],
    expected: float,
    now: float,
) -> bool:
    """Return whether a goal is missed for certain, whatever the requests to come do.

    Args:
        answers: The requests so far.
        goals: The goals.
        window: Begin and end of the time in which requests count.
        expected: Most requests that will count.
        now: The time.
    """
    counted = [each for each in answers if window[0] <= each.sent_at < window[1]]
    return any(
        _misses(counted, goal, now) > CERTAIN * goal.allowed * max(expected, len(counted)) + CERTAIN_MORE
        for goal in goals
    )


def is_clear(
    load: LoadLevel,
    answers: Iterable[LoadAnswer],
    goals: Iterable[Goal],
    window: tuple[float, float],
    now: float,
) -> bool:
    """Return whether a closed loop holds its goals for certain; False for an open one: a queue grows slowly.

    Args:
        load: The load.
        answers: The requests so far.
        goals: The goals.
        window: Begin and end of the time in which requests count.
        now: The time.
    """
    if load.loop == "open":
        return False
    counted = [each for each in answers if window[0] <= each.sent_at < window[1]]
    return all(
        _misses(counted, goal, now) <= goal.allowed * _decided(counted, goal, now) / CERTAIN - CERTAIN_MORE
        for goal in goals
    )


def _misses(counted: Iterable[LoadAnswer], goal: Goal, now: float) -> int:
    return sum(_missed(each, goal, now) for each in counted)


def _decided(counted: Iterable[LoadAnswer], goal: Goal, now: float) -> int:
    """Return the number of requests that have missed a goal or held it."""
    found = (each.seconds(goal.metric, now) for each in counted)
    return sum(each is not None and (each[1] or each[0] >= goal.bound) for each in found)


def _missed(answer: LoadAnswer, goal: Goal, now: float) -> bool:
    found = answer.seconds(goal.metric, now)
    return found is not None and found[0] >= goal.bound


def _in_flight(
    answers: Iterable[LoadAnswer], begin: float, end: float, now: float
) -> tuple[tuple[float, float, float], int]:
    """Return the mean number in flight of each third of a window, and the number exceeded in 1% of it."""
    length = (end - begin) / 3
    if length <= 0:
        return (0.0, 0.0, 0.0), 0
    sums = [0.0, 0.0, 0.0]
    changes: list[tuple[float, int]] = []
    for answer in answers:
        left = now if answer.ended_at is None else answer.ended_at
        for number in range(3):
            third = begin + number * length
            sums[number] += max(0.0, min(left, third + length) - max(answer.sent_at, third))
        if left > begin and answer.sent_at < end:
            changes += [(max(answer.sent_at, begin), 1), (min(left, end), -1)]
    lasted: dict[int, float] = {}
    at, number = begin, 0
    for when, change in [*sorted(changes), (end, 0)]:
        lasted[number] = lasted.get(number, 0.0) + when - at
        at, number = when, number + change
    over, peak = 0.0, 0
    for number in sorted(lasted, reverse=True):
        over += lasted[number]
        peak = number
        if over > 0.01 * (end - begin):
            break
    first, second, third = (each / length for each in sums)
    return (first, second, third), peak


# The generator


class Generator:
    """Puts load steps on a service; an asynchronous context manager.

    An open loop keeps its schedule whatever the service does, and the time of a request counts from when it
    was due. An answer other than 200, an answer that breaks off and an answer without a token are failures.

    Attributes:
        sent: Requests that were sent so far and not refused.

    Args:
        service: The service.
        requests: Makes the requests.
        goals: The goals.
        most: Most requests in flight.
        sleep: Waits some seconds.
    """

    def __init__(
        self,
        service: Service,
        requests: Requests,
        goals: tuple[Goal, ...],
        *,
        most: int = MOST_IN_FLIGHT,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._service = service
        self._requests = requests
        self._goals = goals
        self._most = most
        self._clock = service.clock
        self._sleep = sleep
        self._answers: list[LoadAnswer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._late_s = 0.0
        self.sent = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    async def facts(self) -> ModelFacts:
        """Return the facts about the model."""
        return await self._service.facts(self._requests.model)

    async def step(
        self, load: LoadLevel, *, seconds: float, warm_up: float, drain: float, seed: int, early: bool = False
    ) -> LoadStep:
        """Put a load on the service, and return what came of it.

        A step that has missed a goal for certain ends before its time. Requests that still run at the end are
        cut off.

        Args:
            load: The load.
            seconds: Length of the window in which requests count.
            warm_up: Seconds before the window.
            drain: Most seconds after the window, in which the load goes on.
            seed: Seed of the random numbers.
            early: Whether the step may end before its time once the goals hold for certain.
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
            # An answer that is cut off would look as if it had failed.
            answers = [replace(each) for each in self._answers]
            await self._end()
        await self._settle(others)
        return LoadStep.of(
            load, self._goals, answers, window, began_at=began, now=now, cut=cut, late_s=self._late_s
        )

    def start(self, clients: int, seed: int) -> None:
        """Start clients that run until the generator is closed, for a load beside another one."""
        self._requests.begin(seed)
        for _ in range(min(clients, self._most)):
            self._spawn(self._client(self._clock()))

    def tokens_between(self, begin: float, end: float) -> float:
        """Return the tokens of answers between two times on the clock, spread evenly over each answer."""
        total, now = 0.0, self._clock()
        for answer in self._answers:
            if answer.first_at is None or answer.failed or answer.ended_at is None:
                continue
            last = min(answer.ended_at, now)
            inside = min(last, end) - max(answer.first_at, begin)
            total += answer.tokens * max(0.0, inside) / max(last - answer.first_at, 1e-9)
        return total

    async def _send(self, load: LoadLevel, began: float, stagger_s: float) -> None:
        """Send the requests of a load, without end."""
        if load.loop == "closed":
            clients = int(load.value)
            for number in range(clients):
                # Clients that begin at once would stay in step.
                await self._wait_until(began + stagger_s * number / clients)
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
        # The loop gets a turn every time, so that a rate which is too high blocks nothing.
        await self._sleep(max(0.0, due - self._clock()))
        self._late_s = max(self._late_s, self._clock() - due)

    async def _client(self, due: float) -> None:
        while True:
            answer, ask = self._next(due)
            await self._call(answer, ask)
            if answer.failed:
                # A refusal is quick; the next request mustn't come at once.
                await self._sleep(LOOK_S)
            due = self._clock()

    def _next(self, due: float) -> tuple[LoadAnswer, LoadRequest]:
        ask = self._requests.next()
        answer = LoadAnswer(due, ask.tokens)
        self._answers.append(answer)
        return answer, ask

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, answer: LoadAnswer, ask: LoadRequest) -> None:
        self.sent += 1
        try:
            await self._service.send(ask, answer)
        except ServiceError as error:
            self.sent -= error.unreachable or error.status is not None

    def _counted(self, window: tuple[float, float]) -> int:
        return sum(window[0] <= each.sent_at < window[1] for each in self._answers)

    def _unfinished(self, window: tuple[float, float]) -> bool:
        return any(each.ended_at is None and window[0] <= each.sent_at < window[1] for each in self._answers)

    async def _end(self) -> None:
        """Cut off requests that still run."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, others: int) -> None:
        """Wait until no request of a step runs in the service, apart from the number that ran before."""
        for _ in range(SETTLE_LOOKS):
            if (await self.facts()).in_flight <= others:
                return
            await self._sleep(SETTLE_S)
