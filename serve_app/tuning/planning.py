"""The search for a plan: the fewest replicas, and settings, with which goals hold on a virtual clock."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from batcher.stats import percentiles
from serve_app.simulation.profiles import Profile, Work
from serve_app.tuning.fleet import Fleet, ReplicaSettings, Request, Routing, Run, in_processes, open_loop
from serve_app.tuning.goals import METRICS, Goal, Metric
from serve_app.tuning.workload import Draw, Workload

SHOWN = (50, 99)
"""Percentiles of every metric in a table."""

MOST_LOAD = 0.95
"""Most load of a plan: beyond it the wait of a request depends on how long the load lasts."""

STEP_TOKENS = (16_384, 8_192, 4_096, 2_048, 1_024, 512)
"""Values of `max_num_batched_tokens` that are tried: with a smaller value steps are shorter, and prompts take
more steps."""

RUNS = 4
"""Runs of the answer, and of trials that are close to a goal; other trials are one run each."""

CLOSE = 1.25
"""Ratio of a bound to a figure, or the inverse, below which one run doesn't decide."""

BESIDE = (-1, 1)
"""Rows of the table around the answer, by the difference in replicas."""

SAMPLE = 2
"""Most replicas that are simulated: a sample of a larger fleet, with its share of the requests."""

COUNTED_TOKENS, LEAST_COUNTED, MOST_COUNTED = 120_000, 300, 600
"""Tokens of answers in the part of a run that counts, and the least and most requests of that part."""

WARM_UP_LIVES = 2.0
"""Length of the warm-up, as a multiple of the time of a request."""

BATCH_S, LEAST_BESIDE = 20.0, 60
"""Most virtual seconds of a run beside a batch; the least requests that such a run counts in any case."""

LONE_REQUESTS = 400
"""Requests whose times alone in the service are computed."""

STUDENT = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}
"""Half width of an interval of 95% by the number of runs, in standard errors of their mean."""

MOST_SHARE = 0.9
"""Largest share of the time for prompts and sequences that the expected latency assumes."""

Figures = Mapping[tuple[Metric, int], float]
"""Seconds by metric and percentile."""


class Times(NamedTuple):
    """Times of a request in seconds, and the tokens of its answer."""

    ttft_s: float
    tpot_s: float
    latency_s: float
    output: int


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
    running = min(settings.max_num_seqs, profile.kv_tokens / (prompt + workload.max_tokens))
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


def lone_times(profile: Profile, workload: Workload, settings: ReplicaSettings, draw: Draw) -> Times:
    """Return the times of a request that is alone in the service: its steps have no other work."""
    step, most = profile.step, settings.max_num_batched_tokens
    left = workload.computed(draw.prompt)
    first_s = profile.request_ms / 1e3
    while left:
        part = min(left, most)
        left -= part
        # A prompt of one token is computed like a token of an answer.
        tokens = part if draw.prompt > 1 else 0
        first_s += step.seconds(Work(tokens, 1, draw.prompt - left))
    further = draw.output - 1
    context = further * draw.prompt + further * (further + 1) / 2
    rest_s = further * step.seconds(Work(0, 1, 0)) + step.context_token * context
    return Times(first_s, rest_s / max(further, 1), first_s + rest_s, draw.output)


@dataclass(frozen=True, slots=True)
class Trial:
    """The figures of a number of replicas with some settings, by the simulation.

    Attributes:
        replicas: Number of replicas.
        settings: Settings of the replicas.
        figures: Seconds by metric and percentile, of all runs together.
        errors: Half width in seconds of an interval of 95% for each figure; 0 after one run.
        misses: Goals that don't hold.
        load: Requests per second, as a share of the most that the replicas can do.
        busy: Share of the time in which steps run.
        held: Mean share of the KV cache that is reserved.
        running: The most requests in an engine.
        requests: Requests that were counted.
        row_tokens_per_s: Tokens of rows' answers per second of all replicas.
        short_of_rows: Whether the rows have fewer tokens per second than they need.
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
        self._runs: dict[tuple[int, ReplicaSettings, int], Run] = {}

    def load(self, replicas: int, settings: ReplicaSettings) -> float:
        """Return the requests per second as a share of the most that the replicas can do."""
        return self.workload.rate / (replicas * full_rate(self.profile, self.workload, settings))

    def lone(self, settings: ReplicaSettings) -> Figures:
        """Return the figures of requests that are alone in the service, by arithmetic."""
        draws = islice(self.workload.draws(self._seed), LONE_REQUESTS)
        return self._figures(lone_times(self.profile, self.workload, settings, draw) for draw in draws)

    def run(
        self,
        wanted: Iterable[tuple[int, ReplicaSettings, int]],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the runs of trials that are missing, side by side.

        Args:
            wanted: Trials, by the arguments of `trial`.
            ended: Called after each run.
        """
        keys = [(count, each, number) for count, each, runs in wanted for number in range(runs)]
        missing = [key for key in dict.fromkeys(keys) if key not in self._runs]
        jobs = [partial(self._run, *key) for key in missing]
        if jobs:
            self._runs |= zip(missing, in_processes(jobs, ended), strict=True)

    def trial(self, replicas: int, settings: ReplicaSettings, runs: int = 1) -> Trial:
        """Return the figures of replicas with some settings, from `runs` runs."""
        self.run([(replicas, settings, runs)])
        done = [self._runs[replicas, settings, number] for number in range(runs)]
        figures = self._figures(request for run in done for request in run.requests)
        errors = dict.fromkeys(figures, 0.0)
        if runs > 1:
            parts = [self._figures(run.requests) for run in done]
            factor = STUDENT[runs] / math.sqrt(runs)
            errors = {key: factor * statistics.stdev(part[key] for part in parts) for key in figures}
        rows = statistics.fmean(run.row_tokens_per_s for run in done) * replicas / self._sample(replicas)
        batch = self.workload.batch
        return Trial(
            replicas=replicas,
            settings=settings,
            figures=figures,
            errors=errors,
            misses=tuple(goal for goal in self.goals if figures[goal.key] >= goal.bound),
            load=self.load(replicas, settings),
            busy=statistics.fmean(run.busy for run in done),
            held=statistics.fmean(run.held for run in done),
            running=max(run.most_running for run in done),
            requests=sum(len(run.requests) for run in done),
            row_tokens_per_s=rows,
            short_of_rows=batch is not None and rows < batch.tokens_per_s,
        )

    def _sample(self, replicas: int) -> int:
        """Return the number of replicas that are simulated. With rows one is enough: each has work always."""
        return min(replicas, SAMPLE if self.workload.batch is None else 1)

    def _run(self, replicas: int, settings: ReplicaSettings, number: int) -> Run:
        workload, seed = self.workload, self._seed + number
        sample = self._sample(replicas)
        rate = workload.rate / replicas
        warm_up_s = WARM_UP_LIVES * expected_latency_s(self.profile, workload, rate)
        rate *= sample
        counted = min(max(COUNTED_TOKENS / workload.output.expected, LEAST_COUNTED), MOST_COUNTED)
        if workload.batch is not None:
            # At the start all rows compute their prompts; answers come later.
            warm_up_s = max(warm_up_s, workload.batch.output.expected * workload.step_s(self.profile))
            counted = min(counted, max(BATCH_S * rate, LEAST_BESIDE))
        fleet = Fleet(self.profile, settings, sample, workload, self._routing, seed)
        warm_up = min(math.ceil(warm_up_s * rate), MOST_COUNTED)
        return open_loop(fleet, workload, seed, rate=rate, warm_up=warm_up, counted=math.ceil(counted))

    def _figures(self, requests: Iterable[Request | Times]) -> Figures:
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
    """The answer, and the trials around it.

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
        progress: Called with a line about each step, and after each run.
    """

    def __init__(
        self, trials: Trials, most: int, progress: Callable[[str], None] = lambda line: None
    ) -> None:
        self._trials = trials
        self._most = most
        self._progress = progress
        self._default = ReplicaSettings.of(trials.profile)
        self._done = 0

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            NoPlanError: No plan holds the goals.
        """
        lone = self._check_lone()
        least = self.least_replicas()
        if least > self._most:
            raise self._too_many(least, lone)
        for count in range(self._fewest(least), self._most + 1):
            chosen = self._chosen(count)
            if chosen is not None and (answer := self._confirmed(chosen)).holds:
                return Plan(answer, tuple(self._rows(answer)), least)
        best = max(self._seen(self._most), key=self._slack)
        if (answer := self._confirmed(best)).holds:
            return Plan(answer, tuple(self._rows(answer)), least)
        raise self._missed(answer)

    def least_replicas(self) -> int:
        """Return the fewest replicas that can do the work."""
        trials = self._trials
        rate = full_rate(trials.profile, trials.workload, self._default)
        return max(1, math.ceil(trials.workload.rate / (MOST_LOAD * rate) - 1e-9))

    def _run(self, *wanted: tuple[int, ReplicaSettings, int]) -> None:
        """Make the runs of trials, and report the progress."""
        counts = sorted({count for count, _, _ in wanted})
        line = f"{' and '.join(map(str, counts))} replica{'s' if counts != [1] else ''}"

        def ended() -> None:
            self._done += 1
            self._progress(f"trying {line}, {self._done} run{'s' if self._done != 1 else ''} so far")

        if wanted:
            self._progress(f"trying {line}" if self._done else f"loading vLLM, to try {line}")
        self._trials.run(wanted, ended)

    def _check_lone(self) -> Figures:
        """Raise a NoPlanError if a request that is alone in the service misses a goal."""
        lone = self._trials.lone(self._default)
        if missed := tuple(goal for goal in self._trials.goals if lone[goal.key] >= goal.bound):
            raise NoPlanError(
                f"no number of replicas holds {' and '.join(map(str, missed))}: a request that is alone in "
                f"the service has {_seen(missed, lone)}",
                lone,
                missed,
            )
        return lone

    def _too_many(self, least: int, lone: Figures) -> NoPlanError:
        trials = self._trials
        rate = full_rate(trials.profile, trials.workload, self._default)
        return NoPlanError(
            f"{self._most} replicas can't do the work: each does {rate:.3g} requests per second at most, so "
            f"{trials.workload.rate:g} take at least {least} with a load of {MOST_LOAD:.0%}",
            lone,
            (),
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

    def _guess(self, least: int) -> int:
        """Return the fewest replicas with which the goals hold for a mean request, by arithmetic."""
        profile, workload = self._trials.profile, self._trials.workload
        means = {"tpot": workload.output.expected, "latency": 1.0}
        bounds = [goal.bound * means[goal.metric] for goal in self._trials.goals if goal.metric in means]
        for count in range(least, self._most):
            if expected_latency_s(profile, workload, workload.rate / count) < min(bounds, default=math.inf):
                return count
        return least

    def _fewest(self, least: int) -> int:
        """Return the fewest replicas that hold the goals in one run; one more than allowed if no number does.

        The first number is a guess. The distance from the guess is doubled, and then halved.
        """
        low, high, step, count = least - 1, self._most + 1, 1, self._guess(least)
        while high - low > 1:
            if count > least and low < least:
                # A plan shows both numbers, so they run side by side.
                self._run((count, self._default, 1), (count - 1, self._default, 1))
            if self._chosen(count) is not None:
                high = count
            else:
                low = count
            if low < least:
                count = max(least, high - step)
            elif high > self._most:
                count = min(self._most, low + step)
            else:
                count = (low + high) // 2
            step *= 2
        return high

    def _chosen(self, replicas: int) -> Trial | None:
        """Return the trial with default settings if it holds, else the best that holds; None: none holds."""
        holding = [trial for trial in self._seen(replicas) if trial.holds]
        return max(holding, key=self._slack, default=None)

    def _seen(self, replicas: int) -> list[Trial]:
        """Return the trial with default settings, and trials with other settings if it misses a goal."""
        (default,) = self._decided((replicas, self._default))
        others = [] if default.holds else self._others(default)
        return [default, *self._decided(*((replicas, each) for each in others))]

    def _decided(self, *wanted: tuple[int, ReplicaSettings]) -> list[Trial]:
        """Return trials of one run each, and of more runs where a figure is close to its bound."""
        trials = self._trials
        self._run(*((*each, 1) for each in wanted))
        close = [each for each in wanted if 1 / CLOSE < self._slack(trials.trial(*each)) < CLOSE]
        self._run(*((*each, RUNS) for each in close))
        return [trials.trial(*each, RUNS if each in close else 1) for each in wanted]

    def _others(self, default: Trial) -> list[ReplicaSettings]:
        """Return settings that may hold the goals that the default settings miss.

        With shorter steps, further tokens come sooner, and first tokens later. More rows run at once if they
        reserve less of the KV cache.
        """
        trials, plain = self._trials, self._default
        profile, workload = trials.profile, trials.workload
        found = []
        bounds = [goal.bound for goal in default.misses if goal.metric == "tpot"]
        if bounds and not any(goal.metric == "ttft" for goal in default.misses):
            running = workload.rate / default.replicas * default.figures["latency", 50]
            context = running * (workload.input.expected + workload.output.expected / 2)
            rest_s = min(bounds) - profile.step.seconds(Work(0, running, context))
            tokens = max(rest_s, 0.0) / max(profile.step.prompt_token, 1e-9) + running
            sizes = [
                each for each in STEP_TOKENS if plain.max_num_seqs <= each < plain.max_num_batched_tokens
            ]
            fitting = [each for each in sizes if each <= tokens] or sizes[-1:]
            found += [replace(plain, max_num_batched_tokens=each) for each in fitting[:1]]
        if default.short_of_rows:
            found.append(replace(plain, overcommit=True))
        return [each for each in found if trials.load(default.replicas, each) <= MOST_LOAD]

    def _confirmed(self, trial: Trial) -> Trial:
        """Return a trial from more runs, which run beside the runs of the rows around it."""
        key = trial.replicas, trial.settings
        self._run((*key, RUNS), *((*each, 1) for each in self._around(trial)))
        return self._trials.trial(*key, RUNS)

    def _around(self, answer: Trial) -> list[tuple[int, ReplicaSettings]]:
        """Return the rows around the answer."""
        counts = [answer.replicas + more for more in BESIDE]
        load = self._trials.load
        rows = [
            (count, answer.settings)
            for count in counts
            if 1 <= count <= self._most and load(count, answer.settings) < 1
        ]
        return rows if answer.settings == self._default else [*rows, (answer.replicas, self._default)]

    def _rows(self, answer: Trial) -> Iterator[Trial]:
        """Yield the answer and trials around it, by the number of replicas."""
        around = self._around(answer)
        fewer = self._decided(*(each for each in around if each[0] <= answer.replicas))
        others = [*fewer, *(self._trials.trial(*each) for each in around if each[0] > answer.replicas)]
        yield from sorted([answer, *others], key=lambda row: (row.replicas, row is not answer))

    def _slack(self, trial: Trial) -> float:
        return trial.slack(self._trials.goals)


def _seen(goals: Iterable[Goal], figures: Figures) -> str:
    return ", ".join(f"{goal.name} {figures[goal.key]:.4g} s" for goal in goals)
