"""The search for the highest load of a running service that holds the goals, and the settings for it."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.tuning.goals import Goal, batcher_goals
from serve_app.tuning.load import LoadLevel, LoadStep
from serve_app.tuning.service import ModelFacts

RESOLUTION = 0.05
"""Relative distance of the load that holds from the load that breaks, at which the search ends."""

STEP_BACK = 0.975
"""Factor of the load where the load that held doesn't hold again; its square the next time, and so on."""

MOST_STEPS = 24
"""Most steps of a search: a service whose answers change at random ends it, too."""

LONE_SHARE = 0.3
"""Length of the step with a lone client, as a share of the other steps."""

WARM_UP_LIVES, DRAIN_LIVES = 2.0, 2.0
"""Seconds before the requests that count, and at most after them, in the time that an answer takes."""

FIRST_SHARE = 0.5
"""First load, as a share of the most that a lone request leads to expect."""

CLOSE_SHARE, CLOSE_GROWTH = 0.9, 1.15
"""First rate as a share of the closed loop's requests per second, if they are known, and the first factor."""

CLIENTS_PER_PLACE = 4
"""Most clients of a closed loop, for each request that may run."""

LEAST_RATE = 0.01
"""Lowest rate that is tried, as a share of the first rate."""

SURE_MISSES = 3.0
"""Least number of requests of a step that may miss a goal, for the percentile to mean something."""

MARGIN = 0.95
"""Rate to plan with, as a share of the highest rate that held: other requests draw other random numbers."""

NARROW, NARROW_MARGIN = 0.25, 0.88
"""Rate to plan with where this share of the allowed misses happened: misses come in groups, so other requests
have several times as many."""

UNEVEN = 1.25
"""Requests of the replica that has the most, as a multiple of the mean."""

SPARE = 1.1
"""Requests that may run, as a multiple of the requests that ran."""

QUEUE_MARGIN, LEAST_QUEUE = 1.5, 8
"""Requests that may wait, as a multiple of the requests that start within the time to the first token."""

BACKGROUND_PART = 10
"""Queue of a model that has batch work too, as a multiple: batch work fills nine tenths of the queue."""

Measure = Callable[[float, bool], Awaitable[LoadStep]]
"""Makes a step under a load; True: the step may end before its time once the goals hold for certain."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The end of a search.

    Attributes:
        held: The highest load that holds, confirmed by a second step; None: the lowest load breaks.
        broken: The lowest load above it that breaks; None: the highest load that was allowed holds.
        steps: All steps, in the order in which they were made.
        points: The same, with the steps under one load merged.
    """

    held: LoadStep | None
    broken: LoadStep | None
    steps: tuple[LoadStep, ...]
    points: tuple[LoadStep, ...]


class EdgeSearch:
    """Finds the highest load that holds, in few steps.

    The load grows by a factor, which is squared each time, until it breaks, or shrinks until it holds; then
    the distance is halved until it is 5%. A step that breaks, but is close to a bound, is repeated, and both
    are merged. The load that holds is measured once more at the end, and lowered until both steps together
    are clear of the bounds.

    Args:
        measure: Makes the steps.
        least: The lowest value.
        most: The highest value.
        whole: Whether the values are whole numbers.
        growth: The first factor.
    """

    def __init__(
        self, measure: Measure, *, least: float, most: float, whole: bool = False, growth: float = 2.0
    ) -> None:
        self._measure = measure
        self._least = least
        self._most = most
        self._whole = whole
        self._growth = growth
        self._steps: list[LoadStep] = []
        self._known: dict[float, LoadStep] = {}
        self._repeated: set[float] = set()

    async def find(self, start: float) -> Edge:
        """Return the edge, from a first value on."""
        low, high = await self._bracket(start)
        while low and high and not self._is_narrow(low, high) and len(self._steps) < MOST_STEPS:
            middle = self._value(math.sqrt(low * high))
            if await self._holds(middle):
                low = middle
            else:
                high = middle
        low, high = await self._confirmed(low, high)
        return Edge(
            self._known[low] if low else None,
            self._known[high] if high else None,
            tuple(self._steps),
            tuple(self._known.values()),
        )

    async def _bracket(self, start: float) -> tuple[float, float]:
        """Return a value that holds and a value that breaks; 0: there is none."""
        value = self._value(start)
        factor = self._growth
        low = high = 0.0
        if await self._holds(value):
            while not high and value < self._most:
                low, value = value, self._value(max(value * factor, value + self._whole))
                factor = min(factor * factor, 2.0)
                if not await self._holds(value):
                    high = value
            low = low if high else value
        else:
            while not low and value > self._least:
                high, value = value, self._value(min(value / factor, value - self._whole))
                factor = min(factor * factor, 2.0)
                if await self._holds(value):
                    low = value
            high = high if low else value
        return low, high

    async def _confirmed(self, low: float, high: float) -> tuple[float, float]:
        """Return the bracket with a value that has held in two steps, lowered until there is one."""
        back = 1.0
        while low:
            if await self._holds(low) and low not in self._repeated:
                # Its figures are those of the answer.
                await self._repeat(low, early=False)
            if self._known[low].holds and not self._known[low].unclear:
                break
            high = low
            back *= STEP_BACK
            stepped = self._value(min(low * back, low - self._whole))
            tried = [value for value, step in self._known.items() if step.holds]
            if len(self._steps) < MOST_STEPS:
                tried.append(stepped)
            low = max((value for value in tried if value < high), default=0.0)
        return low, high

    async def _holds(self, value: float) -> bool:
        """Measure a value, twice if it breaks and is unclear; return whether it holds.

        A value that holds and is unclear is repeated at the end, if it is the highest by then.
        """
        if value not in self._known:
            step = self._known[value] = await self._step(value)
            if step.unclear and not step.holds and len(self._steps) < MOST_STEPS:
                await self._repeat(value)
        return self._known[value].holds

    async def _repeat(self, value: float, *, early: bool = True) -> None:
        self._repeated.add(value)
        self._known[value] = self._known[value].merged(await self._step(value, early=early))

    async def _step(self, value: float, *, early: bool = True) -> LoadStep:
        step = await self._measure(value, early)
        self._steps.append(step)
        return step

    def _is_narrow(self, low: float, high: float) -> bool:
        return high <= low * (1 + RESOLUTION) + 1e-12 or (self._whole and high - low <= 1)

    def _value(self, value: float) -> float:
        value = min(max(value, self._least), self._most)
        return float(round(value)) if self._whole else value


class LoadSource(Protocol):
    """A service that takes load steps: a `Generator`, or a model of a service."""

    async def facts(self) -> ModelFacts:
        """Return the facts about the model."""

    async def step(
        self, load: LoadLevel, *, seconds: float, warm_up: float, drain: float, seed: int, early: bool = False
    ) -> LoadStep:
        """Put a load on the service; see `Generator.step`."""


class LoneMissError(Exception):
    """A request that is alone in the service misses the goals already.

    Attributes:
        step: The step with the lone client.
    """

    def __init__(self, step: LoadStep) -> None:
        missed = [goal for goal in step.goals if not step.figure(goal.metric, 50) < goal.bound]
        seen = ", ".join(f"{step.figure(goal.metric, 50):.4g} s ({goal.metric} p50)" for goal in missed)
        super().__init__(
            f"no load holds {' and '.join(map(str, missed))}: a request alone in the service takes {seen}"
        )
        self.step = step


class Tuner:
    """Finds the highest loads that hold the goals.

    Attributes:
        life_s: Seconds of an answer under the highest load that has held so far.

    Args:
        source: The service.
        tokens: Tokens that a mean request reserves: its prompt, and the most that its answer may have.
        goals: The goals.
        seconds: Length of a step.
        seed: Seed of the random numbers; each step has other numbers.
        progress: Called with each load before its step, and with the step after it.
    """

    def __init__(
        self,
        source: LoadSource,
        tokens: float,
        goals: tuple[Goal, ...],
        *,
        seconds: float = 30.0,
        seed: int = 0,
        progress: Callable[[LoadLevel, LoadStep | None], None] = lambda load, step: None,
    ) -> None:
        self._source = source
        self._tokens = tokens
        self._goals = goals
        self._seconds = seconds
        self._seed = seed
        self._progress = progress
        self._alone: LoadStep | None = None
        self.life_s = 0.0

    async def lone(self) -> LoadStep:
        """Return the step with one client.

        Raises:
            LoneMissError: The median of a goal's metric misses its bound.
        """
        load = LoadLevel("closed", 1)
        # The first request of an engine may compile what it needs.
        first = await self._source.step(load, seconds=0.01, warm_up=0.0, drain=self._seconds, seed=self._seed)
        self.life_s = first.median("latency") or self._seconds / 10
        self._progress(load, None)
        alone = await self._source.step(
            load,
            seconds=max(LONE_SHARE * self._seconds, 3 * self.life_s),
            warm_up=0.0,
            drain=DRAIN_LIVES * self.life_s,
            seed=self._next_seed(),
        )
        self._progress(load, alone)
        # Answers of one token have no tpot.
        known = [goal for goal in self._goals if alone.samples[goal.metric]]
        if any(not alone.figure(goal.metric, 50) < goal.bound for goal in known):
            raise LoneMissError(alone)
        self._alone = alone
        self.life_s = alone.median("latency") or self.life_s
        return alone

    async def highest_concurrency(self) -> Edge:
        """Return the edge of the number of clients in a closed loop."""
        facts = await self._source.facts()
        places = self._places(facts)
        search = EdgeSearch(
            lambda value, early: self._step(LoadLevel("closed", value), early=early),
            least=1,
            most=max(1, CLIENTS_PER_PLACE * places),
            whole=True,
        )
        expected, life = await self._expected_rate(facts)
        # Little's law.
        return await search.find(max(1.0, min(FIRST_SHARE * expected * life, places)))

    async def highest_rate(self, closed: Edge | None = None) -> Edge:
        """Return the edge of the requests per second that come at random.

        Args:
            closed: The edge of the closed loop, if it is known: the rates are close.
        """
        expected, _ = await self._expected_rate(await self._source.facts())
        start, growth = FIRST_SHARE * expected, 2.0
        if closed is not None and closed.held is not None:
            start, growth = CLOSE_SHARE * closed.held.rate, CLOSE_GROWTH
        search = EdgeSearch(
            lambda value, early: self._step(LoadLevel("open", value), early=early),
            least=LEAST_RATE * start,
            most=math.inf,
            growth=growth,
        )
        return await search.find(start)

    async def measure(self, load: LoadLevel) -> LoadStep:
        """Return the step under one load, of two steps if the first is unclear."""
        step = await self._step(load)
        return step.merged(await self._step(load)) if step.unclear else step

    async def _expected_rate(self, facts: ModelFacts) -> tuple[float, float]:
        """Return the most requests per second that a lone one leads to expect, and the seconds of its answer.

        The bound is the smaller of two: the answers that may run at once, by Little's law, and the prompts
        one after the other. Neither is reached, since answers slow each other down.
        """
        alone = self._alone or await self.lone()
        life = alone.median("latency") or self.life_s
        prompt = max(alone.median("ttft") - alone.median("tpot"), life / 1000)
        return min(self._places(facts) / life, facts.replicas / prompt), life

    def _places(self, facts: ModelFacts) -> int:
        """Return the requests that may run at once."""
        return facts.replicas * max(1, min(facts.max_num_seqs, int(facts.kv_tokens / self._tokens)))

    async def _step(self, load: LoadLevel, *, early: bool = False) -> LoadStep:
        self._progress(load, None)
        step = await self._source.step(
            load,
            seconds=self._seconds,
            warm_up=min(WARM_UP_LIVES * self.life_s, self._seconds),
            drain=min(DRAIN_LIVES * self.life_s, self._seconds),
            seed=self._next_seed(),
            early=early,
        )
        self._progress(load, step)
        if step.holds:
            self.life_s = max(self.life_s, step.median("latency"))
        return step

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def is_small(step: LoadStep) -> bool:
    """Return whether a step has too few requests for the percentiles of its goals."""
    return any(step.sent * (100 - goal.percentile) / 100 < SURE_MISSES for goal in step.goals)


@dataclass(frozen=True, slots=True)
class TunedSettings:
    """Settings, and the rate that they are for.

    Attributes:
        rate: Requests per second of all replicas.
        max_running: `batcher.max_running`.
        max_queue_size: `batcher.max_queue_size`; None: no goal bounds the wait.
        target_ongoing_requests: The same in `autoscaling_config`: requests in flight per replica.
        goals: `batcher.goals`; empty: no goal is for the p99 of the first token or of the pace.
    """

    rate: float
    max_running: int
    max_queue_size: int | None
    target_ongoing_requests: int
    goals: dict[str, float]

    @property
    def batcher(self) -> dict[str, Any]:
        """The settings under `batcher`."""
        queue = {} if self.max_queue_size is None else {"max_queue_size": self.max_queue_size}
        goals = {"goals": dict(self.goals)} if self.goals else {}
        return {"max_running": self.max_running, **queue, **goals}


def choose(
    step: LoadStep,
    facts: ModelFacts,
    goals: tuple[Goal, ...],
    rate: float | None = None,
    beside_batch: bool = False,
) -> TunedSettings:
    """Return the settings for a load that holds.

    `max_running` is the smallest window that doesn't hold back this load: the number of requests in flight
    that was exceeded in 1% of the time. The queue has the requests that can start before their first token
    would be late.

    Args:
        step: The highest rate that holds.
        facts: The facts about the model, with the replicas that took the load.
        goals: The goals.
        rate: The rate to plan with; None: the rate of the step with a margin.
        beside_batch: Whether requests of the tier `flex` wait in the same queue.
    """
    replicas = facts.replicas
    uneven = UNEVEN if replicas > 1 else 1.0
    running = math.ceil(step.peak / replicas * uneven * SPARE)
    narrow = any(step.missing(goal) >= NARROW * goal.allowed for goal in goals)
    chosen = (NARROW_MARGIN if narrow else MARGIN) * step.load.value if rate is None else rate
    waits = [
        goal.bound - (step.figure("latency", 50) if goal.metric == "latency" else 0.0)
        for goal in goals
        if goal.metric != "tpot"
    ]
    queue = None
    if waits:
        started = max(0.0, min(waits)) * step.load.value / replicas
        queue = max(LEAST_QUEUE, math.ceil(QUEUE_MARGIN * started)) * (BACKGROUND_PART if beside_batch else 1)
    share = chosen / step.load.value if step.load.value else 1.0
    return TunedSettings(
        rate=chosen,
        max_running=max(1, min(running, facts.max_num_seqs)),
        max_queue_size=queue,
        # Little's law: the requests in flight are those that come in the time of an answer.
        target_ongoing_requests=max(1, math.floor(step.in_flight * share / replicas)),
        goals=batcher_goals(goals),
    )
