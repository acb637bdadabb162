"""A load step: requests under one load, and what they say about the goals."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from serve_app.tuning.goals import METRICS, Goal, Metric

Loop = Literal["open", "closed"]

SHOWN = (50, 99)
"""Percentiles of every metric in a table."""

CLOSE = 2.0
"""Factor between the share of requests that miss a goal and the share that may, below which it is unclear."""

CLOSE_DEVIATIONS = 4.0
"""The same in standard deviations of independent requests; those that come in groups have more than one."""

GROWTH, GROWTH_DEVIATIONS = 1.3, 3.0
"""Requests in flight in the last third of a step, as a multiple of those in the first third, and in standard
deviations of a Poisson number beyond: more of them means that the service falls behind."""

CERTAIN, CERTAIN_MORE = 2.0, 3
"""Factor between the misses of a step and those that a goal allows, and their number beyond that, which end
the step early."""


class Load(NamedTuple):
    """A load.

    Attributes:
        loop: "open": requests come at a rate, at random times, whatever becomes of those before (Poisson).
            "closed": clients, each of which sends the next request when it has the answer to the last one.
        value: Requests per second, or clients.
    """

    loop: Loop
    value: float

    def __str__(self) -> str:
        if self.loop == "open":
            return f"{self.value:.4g} requests/s"
        return f"{self.value:g} client" + ("" if self.value == 1 else "s")


@dataclass(slots=True)
class Answer:
    """One request of a step; times are seconds on the clock.

    Attributes:
        sent_at: When it was due, which is when it was sent unless the sender is late.
        tokens: Tokens of the whole answer; of one that still runs those that it asks for.
        first_at: When the first token came; None: not yet.
        ended_at: When the last one came; None: not yet.
        failed: Its answer was an error, or broke off.
    """

    sent_at: float
    tokens: int
    first_at: float | None = None
    ended_at: float | None = None
    failed: bool = False

    def seconds(self, metric: Metric, now: float) -> tuple[float, bool] | None:
        """Return what a metric is, and whether that is final; before the end it is what it is at least.

        None: there is no such time, as of the token after the first one in an answer of one token.
        """
        if self.failed:
            return math.inf, True
        begin, end, parts = self.sent_at, self.ended_at, 1
        if metric == "ttft":
            end = self.first_at
        elif metric == "tpot":
            if self.first_at is None or self.tokens < 2:
                return None
            begin, parts = self.first_at, self.tokens - 1
        return ((now if end is None else end) - begin) / parts, end is not None


@dataclass(frozen=True, slots=True)
class Step:
    """Requests under one load.

    Attributes:
        load: The load.
        goals: The goals.
        samples: Seconds of each metric, ascending; infinite for requests that failed. Of a request that was
            cut off at the end of the step there is what it took until then, where that breaks a goal already.
        sent: Requests that count: those that were sent in the window.
        good: Those that hold all bounds.
        failed: Those that were refused or failed.
        seconds: Length of the window.
        spent_s: Time that the step took, with its warm-up and its end.
        ended: Answers that ended in the window.
        tokens: Their tokens.
        in_flight: Requests in flight, on average.
        peak: Requests in flight that were exceeded in 1% of the time.
        growing: The requests in flight became more and more: the service can't keep up.
        cut: The step was ended before its time, since too many had missed a goal.
        late_s: The longest time by which a request was sent too late.
    """

    load: Load
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
        load: Load,
        goals: tuple[Goal, ...],
        answers: Sequence[Answer],
        window: tuple[float, float],
        *,
        began_at: float,
        now: float,
        cut: bool = False,
        late_s: float = 0.0,
    ) -> "Step":
        """Return the step that some requests make.

        Args:
            load: The load.
            goals: The goals.
            answers: All requests, those of the warm-up too.
            window: Begin and end of the time in which requests count.
            began_at: When the step began.
            now: When it ended.
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
            # Clients of a closed loop are as many as they are.
            growing=load.loop == "open" and last > GROWTH * first + GROWTH_DEVIATIONS * math.sqrt(first),
            cut=cut,
            late_s=late_s,
        )

    def with_(self, other: "Step") -> "Step":
        """Return this step and another one under the same load as one."""
        samples = {metric: sorted([*self.samples[metric], *other.samples[metric]]) for metric in METRICS}
        return Step(
            load=self.load,
            goals=self.goals,
            samples=samples,
            sent=self.sent + other.sent,
            good=self.good + other.good,
            failed=self.failed + other.failed,
            seconds=self.seconds + other.seconds,
            spent_s=self.spent_s + other.spent_s,
            ended=self.ended + other.ended,
            tokens=self.tokens + other.tokens,
            in_flight=(self.in_flight * self.seconds + other.in_flight * other.seconds)
            / max(self.seconds + other.seconds, 1e-9),
            peak=max(self.peak, other.peak),
            # One step that grows may be chance; two are not.
            growing=self.growing and other.growing,
            cut=self.cut or other.cut,
            late_s=max(self.late_s, other.late_s),
        )

    @property
    def misses(self) -> tuple[Goal, ...]:
        """Goals that don't hold."""
        return tuple(goal for goal in self.goals if self.missing(goal) > allowed(goal))

    @property
    def holds(self) -> bool:
        """True if all goals hold, and the service keeps up."""
        return bool(self.sent) and not self.misses and not self.growing and not self.cut

    @property
    def unclear(self) -> bool:
        """True if another step might say something else."""
        if self.cut or not self.sent:
            return False
        if self.growing:
            return not self.misses
        return any(self._is_close(goal) for goal in self.goals)

    def _is_close(self, goal: Goal) -> bool:
        share, most = self.missing(goal), allowed(goal)
        chance = CLOSE_DEVIATIONS * math.sqrt(most * (1 - most) / self.sent)
        return most / CLOSE <= share <= most * CLOSE and abs(share - most) <= chance

    @property
    def goodput(self) -> float:
        """Requests per second that hold all bounds."""
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.sent / self.seconds if self.seconds else 0.0

    @property
    def ended_per_s(self) -> float:
        """Requests per second that were answered."""
        return self.ended / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def missing(self, goal: Goal) -> float:
        """Return the share of requests that miss a goal's bound, 0 to 1."""
        values = self.samples[goal.metric]
        return 1 - bisect_left(values, goal.bound) / len(values) if values else 0.0

    def figure(self, metric: Metric, percentile: int) -> float:
        """Return a percentile of a metric in seconds, by nearest rank; NaN: there is none."""
        values = self.samples[metric]
        if not values:
            return math.nan
        return values[min(len(values) - 1, int(percentile / 100 * len(values)))]


def allowed(goal: Goal) -> float:
    """Return the share of requests that may miss a goal's bound, 0 to 1."""
    return 1 - goal.percentile / 100 + 1e-9


def is_hopeless(
    answers: Iterable[Answer], goals: Iterable[Goal], window: tuple[float, float], expected: float, now: float
) -> bool:
    """Return whether so many requests have missed a goal that it breaks, whatever the others do.

    Args:
        answers: The requests so far.
        goals: The goals.
        window: Begin and end of the time in which requests count.
        expected: Requests that will count at most.
        now: The time.
    """
    counted = [each for each in answers if window[0] <= each.sent_at < window[1]]
    return any(
        _misses(counted, goal, now) > CERTAIN * allowed(goal) * max(expected, len(counted)) + CERTAIN_MORE
        for goal in goals
    )


def is_clear(
    load: Load, answers: Iterable[Answer], goals: Iterable[Goal], window: tuple[float, float], now: float
) -> bool:
    """Return whether so few of many requests have missed the goals that more of them say nothing else.

    Never of an open loop: its queue may grow slowly.

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
        _misses(counted, goal, now) <= allowed(goal) * _decided(counted, goal, now) / CERTAIN - CERTAIN_MORE
        for goal in goals
    )


def _misses(counted: Iterable[Answer], goal: Goal, now: float) -> int:
    return sum(_missed(each, goal, now) for each in counted)


def _decided(counted: Iterable[Answer], goal: Goal, now: float) -> int:
    """Return how many requests have missed a goal or held it."""
    found = (each.seconds(goal.metric, now) for each in counted)
    return sum(each is not None and (each[1] or each[0] >= goal.bound) for each in found)


def _missed(answer: Answer, goal: Goal, now: float) -> bool:
    found = answer.seconds(goal.metric, now)
    return found is not None and found[0] >= goal.bound


def _in_flight(
    answers: Iterable[Answer], begin: float, end: float, now: float
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
    changes.sort()
    lasted: dict[int, float] = {}
    at, number = begin, 0
    for when, change in changes:
        lasted[number] = lasted.get(number, 0.0) + when - at
        at, number = when, number + change
    lasted[number] = lasted.get(number, 0.0) + end - at
    over = 0.0
    peak = 0
    for number in sorted(lasted, reverse=True):
        over += lasted[number]
        peak = number
        if over > 0.01 * (end - begin):
            break
    first, second, third = (each / length for each in sums)
    return (first, second, third), peak
