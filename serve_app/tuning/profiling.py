"""The measurement of a device through a running service, and the fit of a profile's parameters to it."""

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import numpy as np

from serve_app.client import ServiceError
from serve_app.simulation.profiles import Profile
from serve_app.system.yaml_text import dump
from serve_app.tuning.service import TOKENS, LoadAnswer, LoadRequest, ModelFacts, Service
from serve_app.tuning.twin import Fleet, ReplicaSettings, replay
from serve_app.tuning.workload import Arrival, TokenLengths, Workload

MOST_REPEATS = 5
"""Most measurements of a point: two that agree are enough."""

SAME = 1.1
"""Largest ratio of two measurements that agree."""

MOST_SPREAD = 1.25
"""Ratio of the measurements of a point above which a warning asks for other work on the machine."""

PROMPTS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of lone prompts, up to `max_num_batched_tokens`."""

STREAMS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Answers at once, up to `max_num_seqs`."""

SHORT = 32
"""Tokens of a prompt where the number of answers counts."""

ANSWER = 24
"""Least tokens of an answer in which all answers run side by side."""

MOST_STRETCH = 4
"""Most times by which answers are made longer, where they hardly overlap."""

CONTEXT_STREAMS, CONTEXTS = 8, {"short": 0.2, "long": 0.6, "the longest": 1.0}
"""Answers at once where the length of their contexts counts, and these lengths as shares of the longest."""

CONTEXT_S = 1.5
"""Most seconds that the prompts of such a point take."""

BURST, BURSTS = 32, 2
"""Requests of a burst, whose way to the engine is taken one after the other, and bursts."""

SERIAL_MS, SERIAL_SEEDS = 0.1, 5
"""Resolution of `serial_ms`, and runs of the twin for each value."""

LONGEST_S = 45.0
"""Seconds after which no further point is begun."""

IDLE_S, LOOK_S, LOOKS = 10.0, 0.2, 15
"""Seconds to wait for a service that has other requests, seconds between two looks, and most looks at its
statistics."""

KNEES = (128, 192, 256, 384, 512)
"""Values of `hidden_prefill_tokens` that are tried."""

STRAIGHT = 0.01
"""Mean relative error up to which a straight line is good enough."""

KNEE_GAIN = 0.6
"""Squared error with a knee, as a share of the error of a straight line, up to which the knee is taken."""

LEAST_R2, LARGEST_ERROR = 0.98, 0.15
"""Limits beyond which a fit is called bad."""

DIGITS = 4
"""Digits of a measured parameter that mean something."""

PARAMETERS = ("base_ms", "per_prefill_token_ms", "per_sequence_ms", "per_kv_token_ms", "request_ms")
"""Parameters of a profile that the fit solves for."""


class Timing(NamedTuple):
    """A measured time: of a step, or of a request until its first token.

    Attributes:
        about: A short description.
        prefill_tokens: Tokens of prompts that were computed.
        sequences: Sequences in the step.
        kv_tokens: Tokens of context that were read.
        request: Whether it is the time of a request, with its way to the engine.
        milliseconds: The time.
        spread: Ratio of the largest to the smallest of the repeated times.
    """

    about: str
    prefill_tokens: float
    sequences: float
    kv_tokens: float
    request: bool
    milliseconds: float
    spread: float = 1.0


class Burst(NamedTuple):
    """Requests that were sent at once, each by the time of its sending and to its first token, in seconds."""

    requests: Sequence[tuple[float, float]]


class ObservationError(ValueError):
    """The observations don't determine the parameters."""


# The measurement


class Measurement:
    """Measures one model of a service.

    Each point is run once to warm up, since kernels are compiled at their first use. Then it is measured
    twice, and again as long as the measurements differ or other requests ran meanwhile.

    Attributes:
        observations: The points so far.
        bursts: The bursts so far.
        warnings: What makes the points doubtful.

    Args:
        service: The service.
        facts: Facts about the model.
        step_tokens: `max_num_batched_tokens`: a longer prompt takes several steps.
        progress: Called with a line about each point.
        sleep: Waits for a number of seconds.
        seed: Seed of the random prompts, which are in no prefix cache; None: another seed each time.
    """

    def __init__(
        self,
        service: Service,
        facts: ModelFacts,
        step_tokens: int,
        progress: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        seed: int | None = None,
    ) -> None:
        self._service = service
        self._facts = facts
        self._step_tokens = step_tokens
        self._progress = progress
        self._sleep = sleep
        self._numbers = random.Random(seed)
        self._sent = self._strangers = 0
        self._ends_at = math.inf
        self._stretch = 1
        self.observations: list[Timing] = []
        self.bursts: list[Burst] = []
        self.warnings: list[str] = []

    async def run(self) -> None:
        """Measure all points, within a minute.

        Raises:
            ServiceError: The service has several replicas, stays busy, or fails.
        """
        if self._facts.replicas > 1:
            raise ServiceError(
                f"{self._facts.model} has {self._facts.replicas} replicas, which share the requests; measure "
                "a service with one (num_replicas: 1)"
            )
        await self._idle()
        self._ends_at = self._service.clock() + LONGEST_S
        points = list(self._points())
        busy = 0
        for number, (about, warm, measure) in enumerate(points, 1):
            if self._service.clock() > self._ends_at:
                self.warnings.append(
                    f"the engine is slow: {len(points) - number + 1} of {len(points)} points were left out"
                )
                break
            self._progress(f"{number} of {len(points)}: {about}")
            if warm:
                await measure()
            found, others = await self._repeated(measure)
            busy += others
            if found:
                middle = statistics.median_low(each.milliseconds for each in found)
                chosen = next(each for each in found if each.milliseconds == middle)
                times = [each.milliseconds for each in found]
                spread = max(times) / max(min(times), 1e-9)
                self.observations.append(chosen._replace(about=about, spread=spread))
            else:
                self.warnings.append(f"{about}: left out, the answers hardly ran side by side")
        if busy:
            self.warnings.append(f"{busy} requests of others ran meanwhile, and made the times longer")
        self.warnings += [
            f"{each.about}: the times differ by a factor of {each.spread:.2f}; is other work on the machine?"
            for each in self.observations
            if each.spread > MOST_SPREAD
        ]
        self._progress("a burst")
        for _ in range(1 + BURSTS):
            answers = await self._send([SHORT] * self._most(BURST), 2)
            self.bursts.append(Burst([(each.sent_at, each.ttft_s) for each in answers]))
        # The first burst opens the connections.
        del self.bursts[0]

    async def _idle(self) -> None:
        """Wait until nothing runs on the model.

        Raises:
            ServiceError: Other requests keep running.
        """
        waited = 0.0
        while self._facts.in_flight:
            if waited > IDLE_S:
                raise ServiceError(
                    f"{self._facts.in_flight} requests run or wait on {self._facts.model}; measure a service "
                    "without other traffic"
                )
            await self._sleep(LOOK_S)
            waited += LOOK_S
            self._facts = await self._service.facts(self._facts.model)

    async def _repeated(self, measure: Callable[[], Awaitable[Timing | None]]) -> tuple[list[Timing], int]:
        """Measure a point until two measurements agree; return the measurements and the requests of others.

        A measurement beside requests of others counts only if there is no other.
        """
        found: list[Timing] = []
        spoiled: list[Timing] = []
        others = 0
        for _ in range(MOST_REPEATS):
            one = await measure()
            strange = await self._strange()
            if one is None:
                continue
            if strange > 0:
                others = max(others, strange)
                spoiled.append(one)
                continue
            found.append(one)
            times = sorted(each.milliseconds for each in found)
            agree = any(high <= SAME * low for low, high in itertools.pairwise(times))
            if agree or self._service.clock() > self._ends_at:
                break
        return (found, 0) if found else (spoiled, others)

    async def _strange(self) -> int:
        """Return the requests of others since the last look."""
        for _ in range(LOOKS):
            facts = await self._service.facts(self._facts.model)
            strange = facts.submitted - self._facts.submitted - self._sent - self._strangers
            if strange >= 0:
                break
            # The statistics are some seconds old.
            await self._sleep(LOOK_S)
        self._strangers += max(0, strange)
        return strange

    def _points(self) -> Iterator[tuple[str, bool, Callable[[], Awaitable[Timing | None]]]]:
        """Yield the points: what they are, whether they are to be warmed up, and their measurement."""
        longest = min(self._step_tokens, self._facts.max_model_len - 1)
        for length in sorted({min(length, longest) for length in PROMPTS}):
            yield f"a prompt of {length} tokens", True, lambda length=length: self._prompt(length)  # type: ignore[misc]
        most = self._most(self._facts.kv_tokens // (SHORT + 2 * ANSWER))
        counts = {min(count, most) for count in STREAMS}

        def answers(count: int) -> tuple[str, bool, Callable[[], Awaitable[Timing | None]]]:
            about = f"{count} answer{'s' if count > 1 else ''} at once"
            return about, count in (1, most), lambda: self._side_by_side(count, SHORT)

        # The extremes first: a slow device has no time for the rest.
        yield from map(answers, sorted({1, most}))
        count = self._most(CONTEXT_STREAMS)
        for about, share in CONTEXTS.items():
            measure = lambda share=share: self._side_by_side(count, self._context(count, share))  # noqa: E731
            yield f"{count} answers with {about} contexts", False, measure
        yield from map(answers, sorted(counts - {1, most}, reverse=True))

    def _most(self, count: int) -> int:
        return max(1, min(count, self._facts.max_num_seqs))

    def _context(self, count: int, share: float) -> int:
        """Return the prompt tokens of a point with long contexts."""
        tokens = self._facts.kv_tokens // 2
        lone = [each for each in self.observations if each.request]
        if len(lone) > 1:
            per_token = (lone[-1].milliseconds - lone[0].milliseconds) / 1e3
            per_token /= lone[-1].prefill_tokens - lone[0].prefill_tokens
            tokens = min(tokens, int(CONTEXT_S / max(per_token, 1e-9)))
        # The answer grows with the context, and both have to fit.
        step = self._step_tokens // 2
        longest = (self._facts.max_model_len - 2 * ANSWER) * step // (step + count)
        return max(SHORT, int(share * min(tokens // count, longest)))

    async def _prompt(self, length: int) -> Timing:
        (answer,) = await self._send([length], 1)
        return Timing("", length, 1, length, True, answer.ttft_s * 1e3)

    async def _side_by_side(self, count: int, prompt: int) -> Timing | None:
        """Measure the step in which `count` answers run side by side."""
        steps = math.ceil(count * prompt / max(self._step_tokens // 2, 1))
        answers = await self._send([prompt] * count, self._stretch * (ANSWER + 2 * steps + 4))
        found = step_of(answers, prompt)
        if found is None:
            self._stretch = min(2 * self._stretch, MOST_STRETCH)
        return found

    async def _send(self, prompts: Sequence[int], tokens: int) -> list[LoadAnswer]:
        """Send requests at once, and return their answers.

        Raises:
            ServiceError: A request failed.
        """
        self._sent += len(prompts)
        asks = [
            LoadRequest(
                "/v1/completions",
                {
                    "model": self._facts.model,
                    "prompt": self._numbers.choices(TOKENS, k=prompt),
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                },
                tokens,
            )
            for prompt in prompts
        ]
        answers = [LoadAnswer(self._service.clock(), tokens) for _ in asks]
        await asyncio.gather(*map(self._service.send, asks, answers))
        for answer in answers:
            if answer.tokens != tokens:
                raise ServiceError(
                    f"{self._service.url}: an answer had {answer.tokens} tokens in place of {tokens}"
                )
        return answers


def step_of(answers: Sequence[LoadAnswer], prompt: int) -> Timing | None:
    """Return the mean step in the time in which all answers get tokens; None: they hardly overlap.

    Args:
        answers: Answers that ran side by side, with their pieces.
        prompt: Tokens of each prompt.
    """
    begin = max(answer.pieces[0][0] for answer in answers)
    end = min(answer.pieces[-1][0] for answer in answers)
    times, context = [], 0.0
    for answer in answers:
        # The last step with a prompt ends at the begin: the time that counts starts there.
        inside = [piece for piece in answer.pieces if begin <= piece[0] <= end]
        if len(inside) < 2 or inside[-1][1] - inside[0][1] < ANSWER // 4:
            return None
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        times.append((last_at - first_at) / (last - first))
        # The step that makes a token reads the prompt and the tokens before it.
        context += prompt + (first + last - 1) / 2
    return Timing("", 0, len(answers), context, False, statistics.median(times) * 1e3)


# The fit


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted parameters.

    Attributes:
        parameters: Milliseconds by name.
        hidden: `hidden_prefill_tokens`.
        predicted: Milliseconds of each observation with the parameters.
        r2: Share of the variance of the times that they explain.
        largest_error: Largest relative difference between an observation and its prediction.
    """

    parameters: Mapping[str, float]
    hidden: int
    predicted: Sequence[float]
    r2: float
    largest_error: float

    @property
    def bad(self) -> bool:
        """Whether the parameters describe badly what was measured."""
        return self.r2 < LEAST_R2 or self.largest_error > LARGEST_ERROR


def fit(observations: Sequence[Timing]) -> Fit:
    """Return the parameters of at least 0 with the least squared relative errors.

    The errors are relative, since a step of 10 ms says as much as a prompt of 500 ms. Tokens of prompts may
    hide behind the reading of the weights: the line has a knee where that fits clearly better.

    Args:
        observations: Times of steps and of requests.

    Raises:
        ObservationError: The observations are too few, or all alike.
    """
    times = np.array([each.milliseconds for each in observations])
    if (times <= 0).any():
        raise ObservationError("a measured time is not above 0")
    straight = _solved(observations, times, 0)
    if straight is None:
        raise ObservationError(
            "the observations are too few, or too much alike, to tell the parameters apart"
        )
    (found, error), hidden = straight, 0
    for knee in KNEES if math.sqrt(error / len(times)) > STRAIGHT else ():
        solved = _solved(observations, times, knee)
        if solved is not None and solved[1] < min(error, KNEE_GAIN * straight[1]):
            (found, error), hidden = solved, knee
    predicted = _factors(observations, hidden) @ found
    rest = float(((times - predicted) ** 2).sum())
    total = float(((times - times.mean()) ** 2).sum())
    return Fit(
        dict(zip(PARAMETERS, found.tolist(), strict=True)),
        hidden,
        predicted.tolist(),
        1 - rest / total if total else 1.0,
        float(np.abs(predicted / times - 1).max()),
    )


def _factors(observations: Sequence[Timing], hidden: int) -> "np.ndarray":
    """Return the factors of the parameters, a row for each observation."""
    rows = [
        (1.0, max(0.0, each.prefill_tokens - hidden), each.sequences, each.kv_tokens, float(each.request))
        for each in observations
    ]
    return np.array(rows, dtype=float).reshape(-1, len(PARAMETERS))


def _solved(
    observations: Sequence[Timing], times: "np.ndarray", hidden: int
) -> "tuple[np.ndarray, float] | None":
    """Return the least squares solution without negative numbers, and its error; None: there is none.

    In the solution some parameters are 0, and the others are an ordinary solution: with five parameters, all
    choices can be tried.
    """
    weighted = _factors(observations, hidden) / times[:, None]
    # Columns of the same size, so that the rank can be told.
    sizes = np.linalg.norm(weighted, axis=0)
    count = len(PARAMETERS)
    if (sizes == 0).any() or np.linalg.matrix_rank(weighted / sizes, tol=1e-6) < count:
        return None
    scaled, ones = weighted / sizes, np.ones(len(times))
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for kept in map(list, itertools.combinations(range(count), size)):
            part, *_ = np.linalg.lstsq(scaled[:, kept], ones, rcond=None)
            error = float(((scaled[:, kept] @ part - ones) ** 2).sum())
            if (part >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[kept] = part
    return best / sizes, least


def serial_ms(profile: Profile, bursts: Sequence[Burst]) -> float:
    """Return the `serial_ms` with which the twin's bursts have the mean first token of the measured ones.

    Args:
        profile: The profile, without `serial_ms`.
        bursts: The measured bursts, of prompts with `SHORT` tokens.
    """
    if not bursts:
        return 0.0
    load = Workload(1.0, TokenLengths(SHORT), TokenLengths(2), 2)

    def error(value: float) -> float:
        device = profile.model_copy(update={"serial_ms": value})
        differences = []
        for requests in (sorted(burst.requests) for burst in bursts):
            first = requests[0][0]
            arrivals = [Arrival(at - first, SHORT, 2) for at, _ in requests]
            measured = statistics.fmean(ttft for _, ttft in requests)
            for seed in range(SERIAL_SEEDS):
                fleet = Fleet(device, ReplicaSettings.of(device), 1, load, seed=seed)
                run = replay(fleet, load, arrivals, seconds=math.inf)
                differences.append(statistics.fmean(each.ttft_s for each in run.requests) - measured)
        return abs(statistics.fmean(differences))

    values = (round(number * SERIAL_MS, 1) for number in range(int(profile.request_ms / SERIAL_MS) + 1))
    return min(values, key=error)


# The profile


def profile_of(
    fit: Fit, bursts: Sequence[Burst], facts: ModelFacts, name: str, step_tokens: int, source: str
) -> Profile:
    """Return the profile of a device.

    Args:
        fit: The fitted parameters.
        bursts: The measured bursts.
        facts: Facts about the model.
        name: Name of the profile.
        step_tokens: `max_num_batched_tokens`.
        source: Where and when it was measured.

    Raises:
        ObservationError: A step takes no time.
    """
    parameters = {key: float(f"{value:.{DIGITS}g}") for key, value in fit.parameters.items()}
    if not parameters["base_ms"]:
        raise ObservationError("the fit has no base_ms: the times don't grow with the number of steps")
    found = Profile.model_validate(
        {
            "name": name[:64],
            "source": source,
            **parameters,
            "hidden_prefill_tokens": fit.hidden,
            "load_s": facts.load_s,
            "sleep_s": facts.sleep_s,
            "wake_s": facts.wake_s,
            "kv_tokens": facts.kv_tokens,
            "max_model_len": min(facts.max_model_len, facts.kv_tokens),
            "max_num_seqs": facts.max_num_seqs,
            "max_num_batched_tokens": step_tokens,
        }
    )
    return found.model_copy(update={"serial_ms": serial_ms(found, bursts)})


def file_of(profile: Profile, fit: Fit) -> str:
    """Return the text of a profile's file, for `saturate plan --device` and for `simulate` in a config."""
    fields = profile.model_dump(exclude={"device_gb", "awake_gb", "pin_s", "async_scheduling"})
    turns = "" if profile.sleep_s else " sleep_s and wake_s are 0: the model has not slept."
    return f"# R² {fit.r2:.4f}, largest error {fit.largest_error:.1%}.{turns}\n{dump(fields)}"


def source_of(url: str, at: datetime) -> str:
    """Return where and when a profile was measured."""
    return f"measured at {url}, {at:%Y-%m-%d %H:%M} UTC"[:300]
