"""The search for a plan: the fewest replicas, and settings with which their goals hold."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from serve_app.tuning.capacity import full_rate
from serve_app.tuning.goals import Goal
from serve_app.tuning.replica import Settings
from serve_app.tuning.trials import Figures, Trial, Trials

MOST_LOAD = 0.95
"""Most load of a plan: beyond it the wait of a request depends on how long the load lasts."""

STEP_TOKENS = (16_384, 8_192, 4_096, 2_048, 1_024, 512)
"""Values of `max_num_batched_tokens` that are tried: smaller ones make steps short, and prompts take more."""

WINDOWS = (1.1, 1.3, 1.6, 2.0)
"""Values of `max_running` that are tried, as multiples of the requests that run on average."""

RUNS = 4
"""Runs of a trial whose figures are shown."""

BESIDE = (-1, 1, 2)
"""Rows around the answer, by their number of replicas; the last one where the settings are the default."""


class NoPlanError(Exception):
    """No plan holds the goals.

    Attributes:
        best: The figures of a lone request, or of the best trial.
        trial: The best trial; None: a lone request misses the goals.
        misses: Goals that are missed.
    """

    def __init__(self, message: str, best: Figures, misses: tuple[Goal, ...], trial: Trial | None = None):
        super().__init__(message)
        self.best = best
        self.misses = misses
        self.trial = trial


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer, and what is around it.

    Attributes:
        answer: The trial with the fewest replicas that holds all goals.
        rows: Trials with fewer and more replicas, and with default settings; the answer is one of them.
        least: The fewest replicas that can do the work at all.
    """

    answer: Trial
    rows: tuple[Trial, ...]
    least: int


class Search:
    """Finds the fewest replicas that hold the goals.

    Args:
        trials: Runs the trials.
        most: Most replicas.
        progress: Called with a line about each step.
    """

    def __init__(
        self, trials: Trials, most: int, progress: Callable[[str], None] = lambda line: None
    ) -> None:
        self._trials = trials
        self._most = most
        self._progress = progress
        self._default = Settings.of(trials.profile)

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            NoPlanError: There is none.
        """
        self._check_lone()
        least = self.least_replicas()
        if least > self._most:
            raise self._too_many(least)
        found = plain = self._fewest(least, self._default_holds)
        most = self._most if found is None else found - 1
        if most >= least:
            fewer = self._fewest(least, lambda replicas: self._chosen(replicas) is not None, most)
            found = fewer or found
        if found is None:
            best = max(self._candidates(self._most), key=self._slack)
            raise self._missed(self._trials.trial(self._most, best.settings, RUNS))
        answer = self._confirmed(found)
        return Plan(answer, tuple(self._rows(answer, plain)), least)

    def least_replicas(self) -> int:
        """Return the fewest replicas that can do the work."""
        trials = self._trials
        rate = full_rate(trials.profile, trials.workload, self._default)
        return max(1, math.ceil(trials.workload.rate / (MOST_LOAD * rate) - 1e-9))

    def _check_lone(self) -> None:
        """Raise a NoPlanError for a goal that a request misses which is alone in the service."""
        lone = self._trials.lone(self._default)
        missed = tuple(
            goal for goal in self._trials.goals if lone[goal.metric, goal.percentile] >= goal.bound
        )
        if missed:
            raise NoPlanError(
                "no number of replicas holds "
                + " and ".join(str(goal) for goal in missed)
                + ": a request that is alone in the service has "
                + ", ".join(f"{goal.name} {lone[goal.metric, goal.percentile]:.4g} s" for goal in missed),
                lone,
                missed,
            )

    def _too_many(self, least: int) -> NoPlanError:
        trials = self._trials
        trial = trials.trial(self._most, self._default)
        rate = full_rate(trials.profile, trials.workload, self._default)
        return NoPlanError(
            f"{self._most} replicas can't do the work: each does {rate:.3g} requests per second at most, so "
            f"{trials.workload.rate:g} take at least {least} with a load of {MOST_LOAD:.0%}",
            trial.figures,
            trial.misses,
            trial,
        )

    def _missed(self, trial: Trial) -> NoPlanError:
        seen = ", ".join(
            f"{goal.name} {trial.figures[goal.metric, goal.percentile]:.4g} s" for goal in trial.misses
        )
        return NoPlanError(
            f"{self._most} replicas, the most that were allowed, miss "
            f"{' and '.join(map(str, trial.misses))}: the best settings have {seen}",
            trial.figures,
            trial.misses,
            trial,
        )

    def _fewest(self, least: int, holds: Callable[[int], bool], most: int | None = None) -> int | None:
        """Return the fewest replicas of which something holds, by bisection; None: it doesn't hold of `most`.

        Without `most`, the bound is found by doubling the distance.
        """
        high, step = least, 1
        if most is None:
            while not holds(high):
                if high == self._most:
                    return None
                least, high, step = high + 1, min(high + step, self._most), 2 * step
        else:
            high = most
            if not holds(high):
                return None
        while least < high:
            middle = (least + high) // 2
            if holds(middle):
                high = middle
            else:
                least = middle + 1
        return high

    def _default_holds(self, replicas: int) -> bool:
        self._tell(replicas)
        return self._trials.trial(replicas, self._default).holds

    def _chosen(self, replicas: int, runs: int = 1) -> Trial | None:
        """Return the trial of the settings to take: those of no config, or those with the most slack."""
        self._tell(replicas)
        default = self._trials.trial(replicas, self._default, runs)
        if default.holds:
            return default
        holding = [trial for trial in self._candidates(replicas) if trial.holds]
        for trial in sorted(holding, key=self._slack, reverse=True):
            sure = self._trials.trial(replicas, trial.settings, runs)
            if sure.holds:
                return sure
        return None

    def _candidates(self, replicas: int) -> Iterator[Trial]:
        """Yield trials of a grid: the tokens of a step, then, with the best of them, the window."""
        trials = self._trials
        first = trials.trial(replicas, self._default)
        sizes = [self._default]
        for tokens in STEP_TOKENS:
            # vLLM refuses fewer tokens than sequences.
            if self._default.max_num_seqs <= tokens < self._default.max_num_batched_tokens:
                sizes.append(replace(self._default, max_num_batched_tokens=tokens))
        seen = [
            trials.trial(replicas, settings)
            for settings in sizes
            if trials.load(replicas, settings) <= MOST_LOAD
        ]
        yield from seen
        best = max(seen or [first], key=self._slack)
        running = trials.workload.rate / replicas * best.figures["latency", 50]
        for factor in WINDOWS:
            settings = replace(best.settings, max_running=max(1, math.ceil(factor * running)))
            if settings.sequences < best.running and trials.load(replicas, settings) <= MOST_LOAD:
                yield trials.trial(replicas, settings)

    def _confirmed(self, replicas: int) -> Trial:
        """Return the answer; where more runs say that the goals don't hold, it has more replicas.

        Raises:
            NoPlanError: It would be too many.
        """
        last = None
        for count in range(replicas, self._most + 1):
            if (chosen := self._chosen(count, RUNS)) is not None:
                return chosen
            last = self._trials.trial(count, max(self._candidates(count), key=self._slack).settings, RUNS)
        assert last is not None
        raise self._missed(last)

    def _rows(self, answer: Trial, plain: int | None) -> Iterator[Trial]:
        """Yield the answer and what is around it, by the number of replicas.

        Args:
            answer: The answer.
            plain: The fewest replicas with default settings; None: there are too many.
        """
        trials, settings, default = self._trials, answer.settings, self._default
        wanted = [(answer.replicas + more, settings) for more in BESIDE]
        if settings != default:
            wanted[2:] = [(answer.replicas, default), (plain or self._most, default)]
        rows = {(answer.replicas, settings): answer}
        for count, each in wanted:
            if 1 <= count <= self._most and trials.load(count, each) < 1:
                self._tell(count)
                rows[count, each] = trials.trial(count, each, RUNS)
        rows[answer.replicas, settings] = answer
        for _, row in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] != settings)):
            yield row

    def _slack(self, trial: Trial) -> float:
        return trial.slack(self._trials.goals)

    def _tell(self, replicas: int) -> None:
        self._progress(f"{replicas} replica{'s' if replicas != 1 else ''}")
