"""Trials of settings: runs of the model, and what they say about goals."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batcher.stats import percentiles
from serve_app.simulation.profiles import Profile
from serve_app.tuning.capacity import expected_latency_s, full_rate
from serve_app.tuning.fleet import Fleet, Routing, Run, closed_loop, open_loop
from serve_app.tuning.goals import METRICS, Goal, Metric
from serve_app.tuning.replica import Request, Settings
from serve_app.tuning.workload import Workload

SHOWN = (50, 99)
"""Percentiles of every metric in a table."""

SAMPLE = 6
"""Most replicas that are simulated; more are alike, and get their share of the requests."""

LEAST_COUNTED, MOST_COUNTED = 2_000, 4_000
"""Requests of a run that count."""

COUNTED_LIVES, WARM_UP_LIVES = 6.0, 3.0
"""The same in the time that a request takes."""

LONE_REQUESTS = 400

STUDENT = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}
"""Half width of an interval of 95% from so many runs, in standard errors of their mean."""

Figures = Mapping[tuple[Metric, int], float]
"""Seconds by metric and percentile."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the model says about a number of replicas with some settings.

    Attributes:
        replicas: How many there are.
        settings: Their settings.
        figures: Seconds by metric and percentile, of all runs together.
        errors: By how many seconds each may be off, with a probability of 95%, since the runs are samples;
            0 if there was one run.
        misses: Goals that don't hold.
        load: Requests per second, as a share of those that the replicas can do.
        busy: Share of the time in which steps run.
        held: Mean share of the KV cache that is reserved.
        running: The most requests in a step.
        requests: Requests that were counted.
    """

    replicas: int
    settings: Settings
    figures: Figures
    errors: Figures
    misses: tuple[Goal, ...]
    load: float
    busy: float
    held: float
    running: int
    requests: int

    @property
    def holds(self) -> bool:
        """True if all goals hold."""
        return not self.misses

    def slack(self, goals: Iterable[Goal]) -> float:
        """Return the bound of the goal that is closest to a miss, as a multiple of its figure."""
        return min(goal.bound / max(self.figures[goal.metric, goal.percentile], 1e-9) for goal in goals)

    def unsure(self, goals: Iterable[Goal]) -> list[Goal]:
        """Return the goals whose figure is as close to the bound as its error."""
        return [
            goal
            for goal in goals
            if abs(self.figures[goal.metric, goal.percentile] - goal.bound)
            < self.errors[goal.metric, goal.percentile]
        ]


class Trials:
    """Runs trials of one workload on one device; the same trial runs once.

    Args:
        profile: The device.
        workload: The requests.
        goals: The goals.
        seed: Of the random numbers.
        routing: The model's `routing`.
    """

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        goals: Sequence[Goal],
        seed: int = 0,
        routing: Routing = "prefix",
    ) -> None:
        self.profile = profile
        self.workload = workload
        self.goals = goals
        self._seed = seed
        self._routing = routing
        points = {metric: set(SHOWN) for metric in METRICS}
        for goal in goals:
            points[goal.metric].add(goal.percentile)
        self._points = {metric: sorted(each) for metric, each in points.items()}
        self._kept: dict[tuple[int, Settings, int], Trial] = {}

    def load(self, replicas: int, settings: Settings) -> float:
        """Return the requests per second as a share of what the replicas can do."""
        return self.workload.rate / (replicas * full_rate(self.profile, self.workload, settings))

    def lone(self, settings: Settings) -> Figures:
        """Return the figures of requests that are alone in the service."""
        fleet = Fleet(self.profile, settings, 1, self.workload, self._routing)
        run = closed_loop(fleet, self.workload, self._seed, streams=1, requests=LONE_REQUESTS)
        return self._figures(run.requests)

    def trial(self, replicas: int, settings: Settings, runs: int = 1) -> Trial:
        """Return what so many runs say about replicas with some settings."""
        key = replicas, settings, runs
        if key not in self._kept:
            self._kept[key] = self._trial(*key)
        return self._kept[key]

    def _trial(self, replicas: int, settings: Settings, runs: int) -> Trial:
        done = [self._run(replicas, settings, self._seed + number) for number in range(runs)]
        figures = self._figures(request for run in done for request in run.requests)
        errors = dict.fromkeys(figures, 0.0)
        if runs > 1:
            parts = [self._figures(run.requests) for run in done]
            factor = STUDENT[runs] / math.sqrt(runs)
            errors = {key: factor * statistics.stdev(part[key] for part in parts) for key in figures}
        missed = [goal for goal in self.goals if figures[goal.metric, goal.percentile] >= goal.bound]
        return Trial(
            replicas=replicas,
            settings=settings,
            figures=figures,
            errors=errors,
            misses=tuple(missed),
            load=self.load(replicas, settings),
            busy=statistics.fmean(run.busy for run in done),
            held=statistics.fmean(run.held for run in done),
            running=max(run.most_running for run in done),
            requests=sum(len(run.requests) for run in done),
        )

    def _run(self, replicas: int, settings: Settings, seed: int) -> Run:
        rate = self.workload.rate / replicas
        life = expected_latency_s(self.profile, self.workload, rate)
        # Replicas with many requests at once are sampled by fewer.
        sample = min(replicas, SAMPLE, max(2, int(MOST_COUNTED / (COUNTED_LIVES * life * rate + 1))))
        rate *= sample
        fleet = Fleet(self.profile, settings, sample, self.workload, self._routing)
        return open_loop(
            fleet,
            self.workload,
            seed,
            rate=rate,
            warm_up=math.ceil(min(WARM_UP_LIVES * life * rate, MOST_COUNTED)),
            counted=math.ceil(min(max(COUNTED_LIVES * life * rate, LEAST_COUNTED), MOST_COUNTED)),
        )

    def _figures(self, requests: Iterable[Request]) -> Figures:
        found = list(requests)
        samples: dict[Metric, list[float]] = {
            "ttft": [request.ttft_s for request in found],
            # An answer of one token has no token after the first.
            "tpot": [request.tpot_s for request in found if request.output > 1],
            "latency": [request.latency_s for request in found],
        }
        return {
            (metric, point): value
            for metric, points in self._points.items()
            for point, value in zip(
                points, percentiles(samples[metric], [point / 100 for point in points]), strict=True
            )
        }
