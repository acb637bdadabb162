"""Tuning of a running service: load steps, from a lone request to the highest load that holds the goals."""

import math
from collections.abc import Callable
from typing import Protocol

from serve_app.tuning.edge import Edge, EdgeSearch
from serve_app.tuning.goals import METRICS, Goal
from serve_app.tuning.load_step import Load, Step
from serve_app.tuning.service import Facts

LONE_SHARE = 0.3
"""Length of the step with a lone client, as a share of the others."""

WARM_UP_LIVES, DRAIN_LIVES = 2.0, 2.0
"""Seconds before the requests that count, and at most after them, in the time that an answer takes."""

FIRST_SHARE = 0.5
"""First load, as a share of what a lone request leads to expect as the most."""

CLOSE_SHARE, CLOSE_GROWTH = 0.9, 1.15
"""First rate as a share of the requests per second of the closed loop, where one was measured, and the first
factor from there."""

CLIENTS_PER_PLACE = 4
"""Most clients of a closed loop, for each request that may run."""

LEAST_RATE = 0.01
"""Lowest rate that is tried, as a share of the first one."""

SURE_MISSES = 3.0
"""Requests of a step that may miss a goal, at least, for the percentile to mean something."""


class Source(Protocol):
    """A service that takes load steps."""

    async def facts(self) -> Facts:
        """Return the facts about the model."""

    async def step(
        self, load: Load, *, seconds: float, warm_up: float, drain: float, seed: int, early: bool = False
    ) -> Step:
        """Put a load on the service, and return what came of it.

        Args:
            load: The load.
            seconds: Length of the window in which requests count.
            warm_up: Seconds before it.
            drain: Most seconds after it, in which the load goes on.
            seed: Of the random numbers.
            early: The step may end before its time once it is clear that it holds.
        """


class LoneMissError(Exception):
    """A lone request misses the goals already.

    Attributes:
        step: The step with the lone client.
    """

    def __init__(self, step: Step) -> None:
        missed = [goal for goal in step.goals if not step.figure(goal.metric, 50) < goal.bound]
        seen = ", ".join(f"{goal.metric}_p50 {step.figure(goal.metric, 50):.4g} s" for goal in missed)
        super().__init__(
            f"no load holds {' and '.join(map(str, missed))}: a request that is alone in the service has "
            + seen
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
        seed: Of the random numbers; each step has others.
        progress: Called with each step that is about to be made, and with each that was made.
    """

    def __init__(
        self,
        source: Source,
        tokens: float,
        goals: tuple[Goal, ...],
        *,
        seconds: float = 30.0,
        seed: int = 0,
        progress: Callable[[Load, Step | None], None] = lambda load, step: None,
    ) -> None:
        self._source = source
        self._tokens = tokens
        self._goals = goals
        self._seconds = seconds
        self._seed = seed
        self._progress = progress
        self._alone: Step | None = None
        self.life_s = 0.0

    async def lone(self) -> Step:
        """Return the step with one client.

        Raises:
            LoneMissError: It misses a goal, by its median.
        """
        load = Load("closed", 1)
        # The first request of an engine may compile what it needs.
        first = await self._source.step(load, seconds=0.01, warm_up=0.0, drain=self._seconds, seed=self._seed)
        self.life_s = _median(first, "latency") or self._seconds / 10
        self._progress(load, None)
        alone = await self._source.step(
            load,
            seconds=max(LONE_SHARE * self._seconds, 3 * self.life_s),
            warm_up=0.0,
            drain=DRAIN_LIVES * self.life_s,
            seed=self._next_seed(),
        )
        self._progress(load, alone)
        if any(not alone.figure(goal.metric, 50) < goal.bound for goal in self._goals if _has(alone, goal)):
            raise LoneMissError(alone)
        self._alone = alone
        self.life_s = _median(alone, "latency") or self.life_s
        return alone

    async def highest_concurrency(self) -> Edge:
        """Return the edge of the number of clients in a closed loop."""
        facts = await self._source.facts()
        places = self._places(facts)
        search = EdgeSearch(
            lambda value, early: self._step(Load("closed", value), early=early),
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
            lambda value, early: self._step(Load("open", value), early=early),
            least=LEAST_RATE * start,
            most=math.inf,
            growth=growth,
        )
        return await search.find(start)

    async def measure(self, load: Load) -> Step:
        """Return what comes of one load, from two steps where the first is unclear."""
        step = await self._step(load)
        return step.with_(await self._step(load)) if step.unclear else step

    async def _expected_rate(self, facts: Facts) -> tuple[float, float]:
        """Return the most requests per second that a lone one leads to expect, and the seconds of its answer.

        The answers that may run at once, by Little's law, or the prompts one after the other: whichever are
        fewer. Neither is reached, since answers slow each other down.
        """
        alone = self._alone or await self.lone()
        life = _median(alone, "latency") or self.life_s
        token = _median(alone, "tpot")
        prompt = max(_median(alone, "ttft") - token, life / 1000)
        return min(self._places(facts) / life, facts.replicas / prompt), life

    def _places(self, facts: Facts) -> int:
        """Return the requests that may run at once."""
        return facts.replicas * max(1, min(facts.max_num_seqs, int(facts.kv_tokens / self._tokens)))

    async def _step(self, load: Load, *, early: bool = False) -> Step:
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
            self.life_s = max(self.life_s, _median(step, "latency"))
        return step

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def is_small(step: Step) -> bool:
    """Return whether a step has too few requests for the percentiles of its goals."""
    return any(step.sent * (100 - goal.percentile) / 100 < SURE_MISSES for goal in step.goals)


def _has(step: Step, goal: Goal) -> bool:
    """Return whether there are samples for a goal; answers of one token have no tpot."""
    return bool(step.samples[goal.metric])


def _median(step: Step, metric: str) -> float:
    """Return the median of a metric in seconds; 0 where there is none, or where it is infinite."""
    (name,) = (each for each in METRICS if each == metric)
    value = step.figure(name, 50)
    return value if math.isfinite(value) else 0.0
