"""The background: tiers that run beside the foreground, as far as its goals allow."""

import math
from collections.abc import Callable

from batcher.slo import Goals, Window

BACKGROUND = 1
"""The priority from which on records are background, unless told otherwise."""

LEAST_SPACE, MOST_SPACE = 1 / 16, 1 / 2
"""Share of the places, and of the capacity, that is kept for the foreground."""

FORESIGHT = 2.0
"""Space that is kept, as a multiple of the foreground's use lately: its load may double."""

LATELY_S = 15.0

AT_THE_EDGE = 0.9
"""Share of the window that must be full for a record that is held back to be held back by it."""

SPREAD = 1.5
"""How many prompts may start per step, as a multiple of the mean that keeps the window filled."""

LEARNING = 1 / 16
"""Weight of the newest record in what is known of the background."""

FIRST_LIFE = 32.0
"""Steps that a record is thought to stay before one has ended."""


class Peak:
    """The highest value of the last 15 to 30 seconds."""

    def __init__(self) -> None:
        self._before = self._now = 0
        self._since = -math.inf

    def see(self, value: int, now: float) -> None:
        """Take in a value."""
        self._turn(now)
        self._now = max(self._now, value)

    def read(self, now: float) -> int:
        """Return the peak."""
        self._turn(now)
        return max(self._before, self._now)

    def _turn(self, now: float) -> None:
        if now - self._since >= LATELY_S:
            self._before = self._now if now - self._since < 2 * LATELY_S else 0
            self._now = 0
            self._since = now


class Background:
    """Says whether one more background record may start.

    It may if the window (see `Window`) has a place, if places and capacity are left over that the
    foreground may need (twice its peak of late), and if the prompts that start at the same step are not
    too many: the steps of a burst of prompts would be long ones, so the starts are spread.

    Attributes:
        window: How many may run.
        running: Background records that run.
        cost: Their cost.
        held: One was held back, since the last one that wasn't.

    Args:
        goals: The goals of the foreground.
        priority: The class from which on records are background.
        clock: Returns the time in seconds.
    """

    def __init__(self, goals: Goals, priority: int, clock: Callable[[], float]) -> None:
        self.window: Window = Window(goals, clock)
        self.priority: int = priority
        self.running: int = 0
        self.foreground: int = 0
        self.cost: int = 0
        self.foreground_cost: int = 0
        self.held: bool = False
        self._clock = clock
        self._places = Peak()
        self._costs = Peak()
        self._credit = 0.0
        self._prompt = 0.0
        self._life = FIRST_LIFE
        self._stepped = False

    def admits(self, cost: int, records: int, capacity: int, max_running: int) -> bool:
        """Return whether a background slot may start within the bounds of all classes; one may always run."""
        places, costs = self.places(capacity, max_running)
        self.held = self.running > 0 and not (
            self.running + records <= places
            and self.cost + cost <= costs
            and (self._credit > 0 or not self._stepped)
        )
        return not self.held

    def places(self, capacity: int, max_running: int) -> tuple[int, int]:
        """Return how many background records, and how much of their cost, may run beside the foreground."""
        now = self._clock()
        return (
            min(self.window.records, max_running - kept(self._places.read(now), max_running)),
            capacity - kept(self._costs.read(now), capacity),
        )

    def begin(self, background: bool, cost: int, records: int, prompt: int) -> None:
        """Count a slot that starts; without a known prompt its cost stands for it."""
        if background:
            self.running += records
            self.cost += cost
            self._credit -= prompt
            self._prompt += LEARNING * (prompt - self._prompt) if self._prompt else prompt
            return
        self.foreground += records
        self.foreground_cost += cost
        now = self._clock()
        self._places.see(self.foreground, now)
        self._costs.see(self.foreground_cost, now)

    def end(self, background: bool, cost: int, records: int, seconds: float) -> None:
        """Count a slot that has ended after so many seconds."""
        if background:
            self.running -= records
            self.cost -= cost
            if step_s := self.window.mean_step_s:
                self._life += LEARNING * (seconds / step_s - self._life)
        else:
            self.foreground -= records
            self.foreground_cost -= cost

    def grow(self, background: bool, cost: int) -> None:
        """Count what a record reserves beyond what it began with."""
        if background:
            self.cost += cost
        else:
            self.foreground_cost += cost

    def step(self, seconds: float) -> bool:
        """Take in a step of the engine; return whether a record that was held back may go now."""
        self._stepped = True
        window = self.window
        window.step(seconds, self.running, self.held and self.running >= AT_THE_EDGE * window.records)
        per_step = max(1.0, SPREAD * window.records * self._prompt / max(self._life, 1.0))
        self._credit = min(self._credit + per_step, per_step)
        return self.held


def kept(peak: int, bound: int) -> int:
    """Return what is kept of `bound` for a foreground that used `peak` of it."""
    return math.ceil(min(max(FORESIGHT * peak, LEAST_SPACE * bound), MOST_SPACE * bound))
