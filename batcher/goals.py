"""Goals for the requests of the foreground, and how much else may run beside them.

A request that comes waits for the step that runs, then for its own, and for what the way takes. So the
background keeps the steps short at all times: the first request finds the engine as it is.
"""

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from batcher import checks

BACKGROUND = 1  # the priority from which on records are background, unless told otherwise

AIM, LATE = 0.9, 0.95  # share of a goal at which it aims, and above which the window shrinks
PERIOD_S = 0.2  # seconds between two judgements
LEAST_STEPS = 6  # steps between two, at least: a window shows its effect one or two steps later
FIRST_WINDOW = 8  # records with which the window starts
GROWTH, CUT = 1.125, 0.5  # how far one judgement widens or narrows it at most
LATE_CUT = 0.8  # share of it that is left at once by a single late answer
TAILS_POWER = 0.25  # the answers' tails change with this power of the window, as measured on two full cores
FULL = 0.9  # share of it from which on it is full: then it may grow, else the pace
PACE_LEFT = 0.97  # share of the pace that a judgement leaves while the window is full or nothing more fits
HELD_STEPS = 2.0  # steps for which a prompt of the foreground takes the place of others, at most

SMOOTHING = 1 / 12  # weight of the newest step in the mean step
REMEMBERED_STEPS, REMEMBERED_TPOTS = 256, 200
REMEMBERED_TTFTS = 1_000  # of at most the last `LATE_FOR_S` seconds: a p99 of fewer jumps with each late one
LATE_FOR_S = 60.0  # seconds for which a late answer counts: it says nothing of the steps after that
MAY_BE_LATE = 0.01  # share of the answers of this time that may be late, and one of them in any case
ENOUGH_ANSWERS = 20  # answers to see before what they took is believed
AHEAD = 0.75  # steps that a request needs beside its own two from which on the engine schedules ahead
SHARES = 4_096  # parts of the longest wait, to one of which a percentile is exact

LEAST_SPACE, MOST_SPACE = 1 / 16, 1 / 2  # share of the places, and of the capacity, that is kept
FORESIGHT = 2.0  # space that is kept, as a multiple of the use lately: the load may double
LATELY_S = 15.0


@dataclass(frozen=True, slots=True)
class Goals:
    """Times that 99 of 100 requests of the foreground keep to."""

    ttft_p99_s: float  # seconds from the arrival of a request, or from its submission, to the first token
    tpot_p99_s: float | None = None  # seconds per token after the first; None: no goal

    def __post_init__(self) -> None:
        checks.positive("ttft_p99_s", self.ttft_p99_s)
        if self.tpot_p99_s is not None:
            checks.positive("tpot_p99_s", self.tpot_p99_s)


class Background:
    """The tiers that run beside the foreground, as far as its goals allow; none without goals.

    A background record may start if the *window* has a place, if places and capacity are left over that the
    foreground may need (twice its peak of late), and if the *pace*, tokens of prompts that start per step,
    allows it: a burst of prompts makes long steps. A prompt of the foreground takes the place of others.

    The TTFT to expect says how long a step may be. Window and pace fall at once; by an eighth per judgement
    the window grows if it is full, else the pace. The worse of two 99th percentiles counts: the wait for the
    steps of a request that comes at any moment, and by how much the answers of the last minute exceeded two
    mean steps. One answer in a hundred may be late. More of them forbid growth for that minute, but each asks
    for one cut only: answers can be late for reasons that no cut removes.
    """

    def __init__(self, goals: Goals | None, priority: int, clock: Callable[[], float]) -> None:
        self.goals: Goals | None = goals  # window and pace follow a change with the next judgements
        self.priority: int = sys.maxsize if goals is None else priority  # the tier from which on it begins
        self._clock = clock
        self.total: int = 0  # records that run, of all tiers
        self.total_cost: int = 0  # their cost
        self.running: int = 0  # records of the background that run
        self.cost: int = 0  # their cost
        # The last one was held back by the window or the space, or by the pace of starts.
        self._held = self._held_by_pace = False
        self._window = float(FIRST_WINDOW)
        # The most records of the foreground, and the most cost, of this period and of the one before.
        self._peak = self._peak_before = (0, 0)
        self._turned_at = -math.inf
        self._pace = self._credit = 0.0  # tokens of prompts that may start per step, and now
        # Steps: their mean, by how much each exceeded the mean then, and those since the last judgement.
        self._mean_s = 0.0
        self._excess: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._steps = 0
        # Each TTFT, by how much it exceeded two mean steps of its time, when, and the excess for a width of
        # one; TPOT as a multiple of the mean step, and when.
        self._tails: deque[tuple[float, float, float, float]] = deque(maxlen=REMEMBERED_TTFTS)
        self._answers: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_TPOTS)
        self._judged_at = self._narrowed_at = clock()

    def stats(self) -> dict[str, float]:
        """Return the fields of `ContinuousStats` about the background; none without goals."""
        if self.goals is None:
            return {}
        goal_s = self.goals.ttft_p99_s
        return {
            "background_running": self.running,
            "background_window": int(self._window),
            "goal_ttft_s": goal_s,
            "expected_ttft_s": max(self._expected_by_steps(goal_s), self._expected_by_answers(goal_s)),
        }

    def admits(self, cost: int, records: int, capacity: int, max_running: int) -> bool:
        """Return whether background records may start within the bounds of all tiers; one may always run."""
        places, space = self.places(capacity, max_running)
        self._held = self.running > 0 and (self.running + records > places or self.cost + cost > space)
        self._held_by_pace = self.running > 0 and not self._held and self._credit <= 0 and bool(self._excess)
        return not (self._held or self._held_by_pace)

    def places(self, capacity: int, max_running: int) -> tuple[int, int]:
        """Return how many background records, and how much of their cost, may run beside the foreground."""
        records, cost = self._lately()
        return min(int(self._window), _left(records, max_running)), _left(cost, capacity)

    def begin(self, priority: int, cost: int, records: int, prompt: int) -> None:
        """Count records that start; their prompt is in tokens."""
        self.grow(priority, cost, records)
        if priority >= self.priority:
            self._pace = self._pace or max(1.0, prompt)
            self._credit -= prompt
        elif self.goals is not None:
            # A longer one is spread over steps by the engine, whatever starts beside it.
            self._credit = max(self._credit - prompt, min(self._credit, -HELD_STEPS * self._pace))
            self._lately()

    def grow(self, priority: int, cost: int, records: int = 0) -> None:
        """Count what records hold beyond what was counted; less than nothing where they end."""
        self.total += records
        self.total_cost += cost
        if priority >= self.priority:
            self.running += records
            self.cost += cost

    def _lately(self) -> tuple[int, int]:
        """Return the most records of the foreground in the last 15 to 30 seconds, and the most cost."""
        now = self._clock()
        elapsed = now - self._turned_at
        if elapsed >= LATELY_S:
            self._peak_before = self._peak if elapsed < 2 * LATELY_S else (0, 0)
            self._peak = (0, 0)
            self._turned_at = now
        records, cost = self.total - self.running, self.total_cost - self.cost
        self._peak = max(self._peak[0], records), max(self._peak[1], cost)
        return max(self._peak_before[0], self._peak[0]), max(self._peak_before[1], self._peak[1])

    def step(self, seconds: float) -> bool:
        """Take in what a step of the engine took; return whether a record that was held back may go now."""
        if self.goals is None:
            return False
        mean, now = self._mean_s or seconds, self._clock()
        self._excess.append(seconds - mean)
        self._mean_s = mean + SMOOTHING * (seconds - mean)
        self._steps += 1
        if self._mean_s and self._steps >= LEAST_STEPS and now - self._judged_at >= PERIOD_S:
            self._judged_at = now
            self._steps = 0
            self._judge(self.goals)
        self._credit = min(self._credit + self._pace, self._pace)
        return self._held or self._held_by_pace

    def first_token(self, seconds: float) -> None:
        """Take in a TTFT of the foreground; one that is late narrows the window at once."""
        if self.goals is None:
            return
        now = self._clock()
        tail = seconds - 2 * self._mean_s
        self._tails.append((seconds, tail, now, tail / math.pow(self._width(), TAILS_POWER)))
        # Until the window has had time to act, other late answers are of the same cause.
        if seconds > self.goals.ttft_p99_s and now - self._narrowed_at > 2 * seconds:
            self._narrow(LATE_CUT)

    def answered(self, seconds_per_token: float) -> None:
        """Take in the TPOT of an answer of the foreground."""
        if self._mean_s:
            self._answers.append((seconds_per_token / self._mean_s, self._clock()))

    def _expected_by_steps(self, goal_s: float) -> float:
        mean, oldest = self._mean_s, self._clock() - LATE_FOR_S
        # Those that were late long ago would hold the window down for good where no others follow.
        tails = sorted(tail for took, tail, at, _ in self._tails if took <= goal_s or at >= oldest)
        if len(tails) < ENOUGH_ANSWERS:
            # The way of the request and its own prompt: half a step, as long as it is unknown.
            return self._wait(2) + mean / 2
        # Half of the arrivals wait for one and a half steps at most, and the way.
        way = max(0.0, tails[len(tails) // 2] + mean / 2)
        # An engine that schedules ahead has planned the next step already when a request comes.
        ahead = 1 if way > AHEAD * mean else 0
        return self._wait(2 + ahead) + way - ahead * mean

    def _expected_by_answers(self, goal_s: float, since: float = -math.inf) -> float:
        """Return the TTFT to expect by the answers that came since then; 0 if they are too few to tell.

        The 99th percentile of a hundred answers varies by half, by chance. Far enough from the goal, a
        steadier one counts, which asks for no cut: of an exponential with the mean above the median of all.
        """
        oldest = self._clock() - LATE_FOR_S
        latest = [(tail, at) for _, _, at, tail in self._tails if at >= oldest]
        late = max(1, int(MAY_BE_LATE * len(latest)))
        found = sorted(tail for tail, at in latest if at >= since)
        if len(self._tails) < ENOUGH_ANSWERS or len(found) <= late:
            return 0.0
        steps_s, width = 2 * self._mean_s, math.pow(self._width(), TAILS_POWER)
        measured = steps_s + found[-late - 1] * width
        if measured > LATE * goal_s:
            return measured
        usual = sorted(tail for took, _, at, tail in self._tails if took <= goal_s or at >= oldest)
        middle = len(usual) // 2
        median, above = usual[middle], sum(usual[middle:]) / (len(usual) - middle)
        steady = median + (above - median) * math.log(0.5 / MAY_BE_LATE)
        longest = max(found[-late - 1], usual[-max(1, int(MAY_BE_LATE * len(usual))) - 1])
        return min(steps_s + min(steady, longest) * width, LATE * goal_s)

    def _wait(self, steps: int) -> float:
        """Return what 99 of 100 arrivals wait at most for the rest of a step and for the next ones."""
        took = [self._mean_s + excess for excess in self._excess]
        runs = [(took[at], sum(took[at : at + steps])) for at in range(len(took) - steps + 1)]
        if not runs:
            return steps * self._mean_s
        # An arrival meets a step the more likely, the longer it is, and at any moment of it.
        left = 0.01 * sum(first for first, _ in runs)
        share_s = max(whole for _, whole in runs) / SHARES

        def enough(shares: int) -> bool:
            wait_s = shares * share_s
            return sum(min(first, whole - wait_s) for first, whole in runs if whole > wait_s) <= left

        return share_s * bisect_left(range(SHARES), True, key=enough)

    def _judge(self, goals: Goals) -> None:
        mean, goal_s = self._mean_s, goals.ttft_p99_s
        by_steps = self._expected_by_steps(goal_s)
        # By how much a step may become longer, as a factor.
        slack = 1 + (AIM * goal_s - max(by_steps, self._expected_by_answers(goal_s))) / (2 * mean)
        late = max(by_steps, self._expected_by_answers(goal_s, self._narrowed_at)) > LATE * goal_s
        if goals.tpot_p99_s is not None:
            oldest = self._clock() - LATE_FOR_S
            latest = [multiple for multiple, at in self._answers if at >= oldest]
            known = len(self._answers) >= ENOUGH_ANSWERS and len(latest) > 1
            per_token = max(sorted(latest)[-2] if known else 1.0, 1.0) * mean
            slack = min(slack, AIM * goals.tpot_p99_s / per_token)
            late = late or per_token > LATE * goals.tpot_p99_s
        full = self.running >= FULL * int(self._window)
        if full or self._held:
            # Prompts that start together make long steps: the least pace that fills the places is the best.
            self._pace = max(1.0, self._pace * PACE_LEFT)
        if late:
            self._narrow(slack)
        elif slack > 1 and full and (self._held or self._held_by_pace):
            self._window += max(self._window * (min(slack, GROWTH) - 1), min(1.0, 2 * (slack - 1)))
        elif slack > 1 and self._held_by_pace:
            self._pace *= min(slack, GROWTH)

    def _width(self) -> float:
        """Return how many background records run within the window; the window itself if none does."""
        return min(self._window, self.running) or self._window

    def _narrow(self, factor: float) -> None:
        self._narrowed_at = self._clock()
        # Running records can't be stopped: a second cut before it has left would count the same twice.
        factor = max(CUT, factor)
        self._window = max(1.0, min(self._window, self.running * factor))
        self._pace = max(1.0, self._pace * factor)
        # Fewer prompts make the steps more alike. As they were, they would ask for the same cut again.
        self._excess = deque((excess * factor for excess in self._excess), maxlen=REMEMBERED_STEPS)


def _left(peak: int, bound: int) -> int:
    """Return what is left of `bound` beside a foreground that used `peak` of it."""
    return bound - math.ceil(min(max(FORESIGHT * peak, LEAST_SPACE * bound), MOST_SPACE * bound))
