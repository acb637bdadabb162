"""The search for a plan: the fewest replicas, and settings with which latency goals hold, in the twin."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from batcher.stats import percentiles
from serve_app.simulation.profiles import Profile, Work
from serve_app.tuning.goals import METRICS, Goal, Metric
from serve_app.tuning.twin import Fleet, ReplicaSettings, Request, Routing, Run, closed_loop, open_loop
from serve_app.tuning.workload import Workload

SHOWN = (50, 99)
"""Percentiles of every metric in a table."""

MOST_LOAD = 0.95
"""Most load of a plan: beyond it the wait of a request depends on how long the load lasts."""

STEP_TOKENS = (16_384, 8_192, 4_096, 2_048, 1_024, 512)
"""Values of `max_num_batched_tokens` that are tried: smaller ones make steps short, and prompts take more."""

WINDOWS = (1.1, 1.3, 1.6, 2.0)
"""Values of `max_running` that are tried, as multiples of the requests that run on average."""

RUNS = 4
"""Runs of a trial whose figures are shown."""

BESIDE = (-1, 1, 2)
"""Rows of the table around the answer, by the difference in replicas."""

SAMPLE = 6
"""Most replicas that are simulated: a sample of a larger fleet, with its share of the requests."""

LEAST_COUNTED, MOST_COUNTED = 2_000, 4_000
"""Requests of a run that count."""

COUNTED_LIVES, WARM_UP_LIVES = 6.0, 3.0
"""Length of the counted part and of the warm-up, in the time that a request takes."""

BATCH_S, LEAST_BESIDE = 300.0, 200
"""Most virtual seconds of a run beside a batch, unless fewer requests than this come in them."""

LONE_REQUESTS = 400

STUDENT = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}
"""Half width of an interval of 95% by the number of runs, in standard errors of their mean."""

MOST_SHARE = 0.9
"""Share of the time of prompts and sequences up to which the time of a step is computed."""

Figures = Mapping[tuple[Metric, int], float]
"""Seconds by metric and percentile."""


class FitError(ValueError):
    """A request can never run; the message has the sum."""


def check_fit(profile: Profile, workload: Workload) -> None:
    """Raise a FitError if the longest request, or row, doesn't fit the context or the KV cache."""
    longest = [("--input, --output or --max-tokens", workload.input, workload.max_tokens)]
    if workload.batch is not None:
        longest.append(("--batch", workload.batch.input, workload.batch.output.most))
    for option, prompt, answer in longest:
        for limit, name in (
            (profile.max_model_len, "max_model_len"),
            (profile.kv_tokens, "KV cache (kv_tokens)"),
        ):
            if (total := prompt.most + answer) > limit:
                which = "the longest prompt" if prompt.spread else "a prompt"
                raise FitError(
                    f"{which} of {prompt.most:,} tokens and max_tokens {answer:,} are {total:,}, above the "
                    f"{limit:,} of {profile.name}'s {name}; lower {option}"
                )


def full_rate(profile: Profile, workload: Workload, settings: ReplicaSettings) -> float:
    """Return the requests per second of a replica that always has work, on average.

    As many requests end in a step as begin, and each has part in as many steps as its answer has tokens. The
    number of running requests is bounded by the sequences, the KV cache, and the tokens of a step.
    """
    prompt, output = workload.input.expected, workload.output.expected
    computed = workload.computed(round(prompt))
    running = min(settings.sequences, profile.kv_tokens / (prompt + workload.max_tokens))
    begin = min(running / output, settings.max_num_batched_tokens / (computed + output))
    decoding = begin * output
    return begin / profile.step.seconds(Work(begin * computed, decoding, decoding * (prompt + output / 2)))


def expected_latency_s(profile: Profile, workload: Workload, rate: float) -> float:
    """Return the seconds that a mean request takes beside others, as long as a replica keeps up.

    A step is longer than `base_ms` by the share of the time that prompts and sequences take.

    Args:
        profile: The device.
        workload: The requests; their rate doesn't matter.
        rate: Requests per second of the replica.
    """
    prompt, output = workload.input.expected, workload.output.expected
    computed = workload.computed(round(prompt))
    base = profile.step.base
    own = profile.step.seconds(Work(computed, output, output * (prompt + output / 2))) - base
    return profile.request_ms / 1e3 + output * base / (1 - min(rate * own, MOST_SHARE)) + own


@dataclass(frozen=True, slots=True)
class Trial:
    """What the twin says about a number of replicas with some settings.

    Attributes:
        replicas: Number of replicas.
        settings: Settings of the replicas.
        figures: Seconds by metric and percentile, of all runs together.
        errors: Half width in seconds of an interval of 95% for each figure; 0 after one run.
        misses: Goals that don't hold.
        load: Requests per second, as a share of what the replicas can do.
        busy: Share of the time in which steps run.
        held: Mean share of the KV cache that is reserved.
        running: The most requests in a step.
        requests: Requests that were counted.
        row_tokens_per_s: Tokens of rows' answers per second of all replicas.
        short_of_rows: The rows have fewer tokens per second than are needed.
    """

    replicas: int
    settings: ReplicaSettings
    figures: Figures
    errors: Figures
    misses: tuple[Goal, ...]
    load: float
    busy: float
    held: float
    running: int
    requests: int
    row_tokens_per_s: float = 0.0
    short_of_rows: bool = False

    @property
    def holds(self) -> bool:
        """Whether all goals hold, and rows have the tokens that they need."""
        return not self.misses and not self.short_of_rows

    def slack(self, goals: Iterable[Goal]) -> float:
        """Return the least ratio of a goal's bound to its figure: below 1 a goal is missed."""
        return min(goal.bound / max(self.figures[goal.key], 1e-9) for goal in goals)

    def unsure(self, goals: Iterable[Goal]) -> list[Goal]:
        """Return the goals whose figure is closer to the bound than its error."""
        return [goal for goal in goals if abs(self.figures[goal.key] - goal.bound) < self.errors[goal.key]]


class Trials:
    """Runs trials of one workload on one device; the same trial runs once.

    Args:
        profile: The device.
        workload: The requests.
        goals: The goals.
        seed: Seed of the random numbers.
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
        self._kept: dict[tuple[int, ReplicaSettings, int], Trial] = {}

    def load(self, replicas: int, settings: ReplicaSettings) -> float:
        """Return the requests per second as a share of what the replicas can do."""
        return self.workload.rate / (replicas * full_rate(self.profile, self.workload, settings))

    def lone(self, settings: ReplicaSettings) -> Figures:
        """Return the figures of requests that are alone in the service."""
        workload = replace(self.workload, batch=None)
        fleet = Fleet(self.profile, settings, 1, workload, self._routing, self._seed)
        run = closed_loop(fleet, workload, self._seed, streams=1, requests=LONE_REQUESTS)
        return self._figures(run.requests)

    def trial(self, replicas: int, settings: ReplicaSettings, runs: int = 1) -> Trial:
        """Return what `runs` runs say about replicas with some settings."""
        key = replicas, settings, runs
        if key not in self._kept:
            self._kept[key] = self._trial(*key)
        return self._kept[key]

    def _trial(self, replicas: int, settings: ReplicaSettings, runs: int) -> Trial:
        done = [self._run(replicas, settings, self._seed + number) for number in range(runs)]
        figures = self._figures(request for run, _ in done for request in run.requests)
        errors = dict.fromkeys(figures, 0.0)
        if runs > 1:
            parts = [self._figures(run.requests) for run, _ in done]
            factor = STUDENT[runs] / math.sqrt(runs)
            errors = {key: factor * statistics.stdev(part[key] for part in parts) for key in figures}
        rows = statistics.fmean(run.row_tokens_per_s * replicas / sample for run, sample in done)
        batch = self.workload.batch
        return Trial(
            replicas=replicas,
            settings=settings,
            figures=figures,
            errors=errors,
            misses=tuple(goal for goal in self.goals if figures[goal.key] >= goal.bound),
            load=self.load(replicas, settings),
            busy=statistics.fmean(run.busy for run, _ in done),
            held=statistics.fmean(run.held for run, _ in done),
            running=max(run.most_running for run, _ in done),
            requests=sum(len(run.requests) for run, _ in done),
            row_tokens_per_s=rows,
            short_of_rows=batch is not None and rows < batch.tokens_per_s,
        )

    def _run(self, replicas: int, settings: ReplicaSettings, seed: int) -> tuple[Run, int]:
        """Return a run, and the number of replicas that were simulated."""
        workload = self.workload
        rate = workload.rate / replicas
        life = expected_latency_s(self.profile, workload, rate)
        # A replica with many requests at once needs fewer replicas beside it.
        sample = min(replicas, SAMPLE, max(2, int(MOST_COUNTED / (COUNTED_LIVES * life * rate + 1))))
        rate *= sample
        warm_up_s = WARM_UP_LIVES * life
        if workload.batch is not None:
            # The first rows all have their prompts before them.
            warm_up_s = max(warm_up_s, workload.batch.output.expected * workload.step_s(self.profile))
        counted = min(max(COUNTED_LIVES * life * rate, LEAST_COUNTED), MOST_COUNTED)
        if workload.batch is not None:
            # Rows keep the replicas busy between requests, too.
            counted = min(counted, max(BATCH_S * rate, LEAST_BESIDE))
        fleet = Fleet(self.profile, settings, sample, workload, self._routing, seed)
        run = open_loop(
            fleet,
            workload,
            seed,
            rate=rate,
            warm_up=math.ceil(min(warm_up_s * rate, MOST_COUNTED)),
            counted=math.ceil(counted),
        )
        return run, sample

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
        self._default = ReplicaSettings.of(trials.profile)

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            NoPlanError: There is none.
        """
        self._check_lone()
        least = self.least_replicas()
        if least > self._most:
            raise self._too_many(least)
        found = plain = self._fewest(least, lambda count: self._try(count, self._default).holds)
        most = self._most if found is None else found - 1
        if most >= least:
            fewer = self._fewest(least, lambda count: self._chosen(count) is not None, most)
            found = fewer or found
        if found is None:
            best = max(self._candidates(self._most), key=self._slack)
            raise self._missed(self._try(self._most, best.settings, RUNS))
        answer = self._confirmed(found)
        return Plan(answer, tuple(self._rows(answer, plain)), least)

    def least_replicas(self) -> int:
        """Return the fewest replicas that can do the work."""
        trials = self._trials
        rate = full_rate(trials.profile, trials.workload, self._default)
        return max(1, math.ceil(trials.workload.rate / (MOST_LOAD * rate) - 1e-9))

    def _try(self, replicas: int, settings: ReplicaSettings, runs: int = 1) -> Trial:
        self._progress(f"{replicas} replica{'s' if replicas != 1 else ''}")
        return self._trials.trial(replicas, settings, runs)

    def _check_lone(self) -> None:
        """Raise a NoPlanError if a request that is alone in the service misses a goal."""
        lone = self._trials.lone(self._default)
        if missed := tuple(goal for goal in self._trials.goals if lone[goal.key] >= goal.bound):
            raise NoPlanError(
                f"no number of replicas holds {' and '.join(map(str, missed))}: a request that is alone in "
                f"the service has {_seen(missed, lone)}",
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
        wanted, seen = list(map(str, trial.misses)), _seen(trial.misses, trial.figures)
        if trial.short_of_rows and (batch := self._trials.workload.batch) is not None:
            wanted.append(f"{batch.tokens_per_s:g} tokens/s for the batch")
            seen = ", ".join(filter(None, [seen, f"{trial.row_tokens_per_s:,.0f} tokens/s"]))
        return NoPlanError(
            f"{self._most} replicas, the most that were allowed, miss {' and '.join(wanted)}: the best "
            f"settings have {seen}",
            trial.figures,
            trial.misses,
            trial,
        )

    def _fewest(self, least: int, holds: Callable[[int], bool], most: int | None = None) -> int | None:
        """Return the smallest count for which `holds` is true, by bisection; None: it is false for `most`.

        Without `most`, the upper bound is found by doubling the distance.
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

    def _chosen(self, replicas: int, runs: int = 1) -> Trial | None:
        """Return the trial with default settings if the goals hold, else with the settings of most slack."""
        default = self._try(replicas, self._default, runs)
        if default.holds:
            return default
        holding = [trial for trial in self._candidates(replicas) if trial.holds]
        for trial in sorted(holding, key=self._slack, reverse=True):
            sure = self._try(replicas, trial.settings, runs)
            if sure.holds:
                return sure
        return None

    def _candidates(self, replicas: int) -> Iterator[Trial]:
        """Yield trials of a grid: the tokens of a step, then, with the best of them, the window."""
        trials, default = self._trials, self._default
        first = trials.trial(replicas, default)
        sizes = [default]
        for tokens in STEP_TOKENS:
            # vLLM refuses fewer tokens than sequences.
            if default.max_num_seqs <= tokens < default.max_num_batched_tokens:
                sizes.append(replace(default, max_num_batched_tokens=tokens))
        if trials.workload.batch is not None:
            sizes.append(replace(default, overcommit=True))
        seen = [
            self._try(replicas, settings)
            for settings in sizes
            if trials.load(replicas, settings) <= MOST_LOAD
        ]
        yield from seen
        best = max(seen or [first], key=self._slack)
        running = trials.workload.rate / replicas * best.figures["latency", 50]
        for factor in WINDOWS:
            settings = replace(best.settings, max_running=max(1, math.ceil(factor * running)))
            if settings.sequences < best.running and trials.load(replicas, settings) <= MOST_LOAD:
                yield self._try(replicas, settings)

    def _confirmed(self, replicas: int) -> Trial:
        """Return the answer, from more runs; with more replicas if the goals don't hold in these runs.

        Raises:
            NoPlanError: More replicas than allowed are needed.
        """
        last = None
        for count in range(replicas, self._most + 1):
            if (chosen := self._chosen(count, RUNS)) is not None:
                return chosen
            last = self._try(count, max(self._candidates(count), key=self._slack).settings, RUNS)
        assert last is not None
        raise self._missed(last)

    def _rows(self, answer: Trial, plain: int | None) -> Iterator[Trial]:
        """Yield the answer and trials around it, by the number of replicas.

        Args:
            answer: The answer.
            plain: The fewest replicas with default settings; None: more than allowed.
        """
        trials, settings, default = self._trials, answer.settings, self._default
        wanted = [(answer.replicas + more, settings) for more in BESIDE]
        if settings != default:
            wanted[2:] = [(answer.replicas, default), (plain or self._most, default)]
        rows = {(answer.replicas, settings): answer}
        for count, each in wanted:
            if 1 <= count <= self._most and trials.load(count, each) < 1 and (count, each) not in rows:
                rows[count, each] = self._try(count, each, RUNS)
        for _, row in sorted(rows.items(), key=lambda item: (item[0][0], item[0][1] != settings)):
            yield row

    def _slack(self, trial: Trial) -> float:
        return trial.slack(self._trials.goals)


def _seen(goals: Iterable[Goal], figures: Figures) -> str:
    return ", ".join(f"{goal.name} {figures[goal.key]:.4g} s" for goal in goals)
