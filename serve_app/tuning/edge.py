"""The search for the highest load that holds the goals."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serve_app.tuning.load_step import Step

RESOLUTION = 0.05
"""Distance of the load that holds from the one that breaks, at which the search ends."""

STEP_BACK = 0.975
"""Factor of the load where the load that held doesn't hold again; its square the next time, and so on."""

MOST_STEPS = 24
"""Steps of a search, at most: a service whose answers change at random ends it, too."""

Measure = Callable[[float, bool], Awaitable[Step]]
"""Makes a step under a load; True: it may end before its time once it is clear that it holds."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The end of a search.

    Attributes:
        held: The highest load that holds, confirmed by a second step; None: the lowest one breaks.
        broken: The lowest load above it that breaks; None: the highest one that was allowed holds.
        steps: All steps, in the order in which they were made.
        points: The same, those under one load as one.
    """

    held: Step | None
    broken: Step | None
    steps: tuple[Step, ...]
    points: tuple[Step, ...]


class EdgeSearch:
    """Finds the highest load that holds, in few steps.

    The load grows by a factor, which is squared each time, until it breaks, or shrinks until it holds; then
    the distance is halved until it is 5%. A step that breaks, but is close to a bound, is repeated, and both
    count as one. The load that holds is measured once more at the end, and lowered until both steps
    together are clear of the bounds.

    Args:
        measure: Makes the steps.
        least: The lowest value.
        most: The highest value.
        whole: The values are whole numbers.
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
        self._steps: list[Step] = []
        self._known: dict[float, Step] = {}
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
        """Return a value that holds and one that breaks; 0: there is none."""
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
        """Measure a value, twice where it breaks and is unclear; return whether it holds.

        One that holds and is unclear is repeated at the end, if it is the highest by then.
        """
        if value not in self._known:
            step = self._known[value] = await self._step(value)
            if step.unclear and not step.holds and len(self._steps) < MOST_STEPS:
                await self._repeat(value)
        return self._known[value].holds

    async def _repeat(self, value: float, *, early: bool = True) -> None:
        self._repeated.add(value)
        self._known[value] = self._known[value].with_(await self._step(value, early=early))

    async def _step(self, value: float, *, early: bool = True) -> Step:
        step = await self._measure(value, early)
        self._steps.append(step)
        return step

    def _is_narrow(self, low: float, high: float) -> bool:
        return high <= low * (1 + RESOLUTION) + 1e-12 or (self._whole and high - low <= 1)

    def _value(self, value: float) -> float:
        value = min(max(value, self._least), self._most)
        return float(round(value)) if self._whole else value
