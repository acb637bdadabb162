"""Goals for the requests of the foreground, and how much else may run beside them.

A request that comes to a busy engine waits for the step that runs, then for its own: two steps and what
the way takes. So what runs in the background must keep the steps short at all times, also while the
foreground is empty: its first request finds the engine as it is.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise

from batcher import checks

AIM = 0.9
"""Share of a goal at which the window aims; above `1 - (1 - AIM) / 2` of it the window shrinks."""

PERIOD_S = 0.2
"""Seconds between two judgements."""

LEAST_STEPS = 6
"""Steps between two judgements, at least: a window shows its effect one or two steps later."""

FIRST_WINDOW = 8
"""Records with which the window starts."""

GROWTH = 1.125
CUT = 0.5
"""How far one judgement widens or narrows the window at most."""

LATE_CUT = 0.8
"""Share of the window that is left at once by a single late answer."""

SMOOTHING = 1 / 12
"""Weight of the newest step in the mean step."""

REMEMBERED_STEPS = 256
REMEMBERED_ANSWERS = 200
ENOUGH_ANSWERS = 20
"""Answers to see before what they took is believed."""


@dataclass(frozen=True, slots=True)
class Goals:
    """Times that 99 of 100 requests of the foreground keep to.

    Attributes:
        ttft_p99_s: Seconds from submission to the first token.
        tpot_p99_s: Seconds per token after the first; None: no goal.

    Raises:
        ValueError: A goal is not a finite number above 0.
    """

    ttft_p99_s: float
    tpot_p99_s: float | None = None

    def __post_init__(self) -> None:
        checks.positive("ttft_p99_s", self.ttft_p99_s)
        if self.tpot_p99_s is not None:
            checks.positive("tpot_p99_s", self.tpot_p99_s)


class Window:
    """Finds how many background records may run while the foreground keeps its goals.

    The TTFT to expect is two mean steps and a tail. The mean follows a change of the window within a few
    steps; the tail is told in two ways, and the worse one counts: by how much two consecutive steps
    exceed two mean ones, and by how much answers of the foreground did, each at its 99th percentile. So
    it is known before the first answer, too. From the TTFT to expect follows how long a step may be, and
    the window goes that way: down at once, up by an eighth per judgement.

    Attributes:
        goals: The goals.
        mean_step_s: Mean seconds of the latest steps; 0 before the first.

    Args:
        goals: The goals.
        clock: Returns the time in seconds.
    """

    def __init__(self, goals: Goals, clock: Callable[[], float]) -> None:
        self.goals: Goals = goals
        self._clock = clock
        self._records = float(FIRST_WINDOW)
        self.mean_step_s: float = 0.0
        # By how much each step exceeded the mean of its time.
        self._excess: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._steps = 0
        # By how much each TTFT exceeded two mean steps of its time.
        self._tails: deque[float] = deque(maxlen=REMEMBERED_ANSWERS)
        # TPOT as a multiple of the mean step at its time.
        self._answers: deque[float] = deque(maxlen=REMEMBERED_ANSWERS)
        self._judged_at = clock()
        self._cut_at = self._judged_at

    @property
    def records(self) -> int:
        """How many background records may run, at least one."""
        return int(self._records)

    def step(self, seconds: float, in_flight: int, wanted: bool) -> None:
        """Take in a step of the engine.

        Args:
            seconds: What it took.
            in_flight: Background records that run.
            wanted: More would run if the window were wider.
        """
        mean = self.mean_step_s or seconds
        self._excess.append(seconds - mean)
        self.mean_step_s = mean + SMOOTHING * (seconds - mean)
        self._steps += 1
        if self._steps < LEAST_STEPS:
            return
        now = self._clock()
        if now - self._judged_at >= PERIOD_S:
            self._judged_at = now
            self._steps = 0
            self._judge(in_flight, wanted)

    def first_token(self, seconds: float, in_flight: int) -> None:
        """Take in the TTFT of an answer of the foreground; one that is late narrows the window at once."""
        self._tails.append(seconds - 2 * self.mean_step_s)
        if seconds <= self.goals.ttft_p99_s:
            return
        now = self._clock()
        # Until the window has had time to act, other late answers are of the same cause.
        if now - self._cut_at > 2 * seconds:
            self._cut_at = now
            self._narrow(LATE_CUT, in_flight)

    def answered(self, seconds_per_token: float) -> None:
        """Take in the TPOT of an answer of the foreground."""
        if self.mean_step_s:
            self._answers.append(seconds_per_token / self.mean_step_s)

    def expected_ttft_s(self) -> float:
        """Return the 99th percentile of the TTFT to expect now."""
        mean = self.mean_step_s
        tails = self._tails
        if len(tails) < ENOUGH_ANSWERS:
            # The way of the request and its own prompt: half a step, as long as it is unknown.
            return 2.5 * mean + self._pair()
        way = max(0.0, sorted(tails)[len(tails) // 2] + mean / 2)
        return 2 * mean + max(self._pair() + way, nlargest(2, tails)[1])

    def _pair(self) -> float:
        """Return by how much 99 of 100 arrivals find two steps to exceed two mean ones, at most.

        An arrival meets a step the more likely, the longer it is.
        """
        excess = list(self._excess)
        mean = self.mean_step_s
        pairs = sorted(((a + b, a + mean) for a, b in pairwise(excess)), reverse=True)
        left = 0.01 * sum(weight for _, weight in pairs)
        for pair, weight in pairs:
            left -= weight
            if left <= 0:
                return pair
        return 0.0

    def _judge(self, in_flight: int, wanted: bool) -> None:
        mean = self.mean_step_s
        if not mean:
            return
        goals = self.goals
        expected = self.expected_ttft_s()
        # By how much a step may become longer, as a factor.
        slack = 1 + (AIM * goals.ttft_p99_s - expected) / (2 * mean)
        late = expected > (1 + AIM) / 2 * goals.ttft_p99_s
        if goals.tpot_p99_s is not None:
            answers = self._answers
            worst = nlargest(2, answers)[1] if len(answers) >= ENOUGH_ANSWERS else 1.0
            per_token = max(worst, 1.0) * mean
            slack = min(slack, AIM * goals.tpot_p99_s / per_token)
            late = late or per_token > (1 + AIM) / 2 * goals.tpot_p99_s
        if late:
            self._narrow(slack, in_flight)
        elif slack > 1 and wanted:
            self._records += max(self._records * (min(slack, GROWTH) - 1), min(1.0, 2 * (slack - 1)))

    def _narrow(self, factor: float, in_flight: int) -> None:
        # What runs can't be stopped: a second cut before it has left would count the same twice.
        self._records = max(1.0, min(self._records, in_flight * max(CUT, factor)))
