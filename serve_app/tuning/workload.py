"""The requests of a service: their rate, and the lengths of prompts and answers."""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.simulation.profiles import BLOCK, Profile

CUT = 3.09
"""Standard deviations of the logarithm at which a length is cut: one length of 1,000 is longer."""


class LengthError(ValueError):
    """A length can't be read; the message says what is allowed."""


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Lengths in tokens: all the same, or lognormal.

    Attributes:
        mean: Their mean before they are cut.
        spread: Their standard deviation; 0: all are the same.
        most: The longest one.
    """

    mean: float
    spread: float = 0.0
    most: int = 0

    def __post_init__(self) -> None:
        if not self.most:
            mu, sigma = self._parameters()
            object.__setattr__(self, "most", max(1, math.ceil(math.exp(mu + CUT * sigma) - 1e-6)))

    @classmethod
    def parse(cls, text: str) -> "TokenLengths":
        """Return the lengths of a text: "300", or "300:150" for a mean and a standard deviation.

        Raises:
            LengthError: The text is neither.
        """
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip())
        if match is None or not int(match[1]):
            raise LengthError(
                f"{text!r} is no length; write tokens, as in 300, or MEAN:SPREAD, as in 300:150"
            )
        return cls(float(match[1]), float(match[2] or 0))

    def cut(self, most: int) -> "TokenLengths":
        """Return the same lengths, cut at `most`."""
        return TokenLengths(self.mean, self.spread, most)

    def draw(self, numbers: random.Random) -> int:
        """Return a length of at least 1."""
        if not self.spread:
            return min(round(self.mean), self.most)
        mu, sigma = self._parameters()
        return min(max(1, round(numbers.lognormvariate(mu, sigma))), self.most)

    @property
    def expected(self) -> float:
        """The mean of the lengths after the cut."""
        if not self.spread:
            return min(self.mean, self.most)
        mu, sigma = self._parameters()
        place = (math.log(self.most) - mu) / sigma
        below = self.mean * _normal(place - sigma)
        return below + self.most * (1 - _normal(place))

    def _parameters(self) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm."""
        sigma = math.sqrt(math.log1p((self.spread / self.mean) ** 2))
        return math.log(self.mean) - sigma**2 / 2, sigma

    def __str__(self) -> str:
        return f"{self.mean:g}:{self.spread:g}" if self.spread else f"{self.mean:g}"


def _normal(place: float) -> float:
    """Return the probability that a standard normal number is below `place`."""
    return (1 + math.erf(place / math.sqrt(2))) / 2


class Draw(NamedTuple):
    """Random numbers of one request, the same for all settings that are compared.

    Attributes:
        gap: Time since the request before, as a multiple of the mean.
        prompt: Tokens of its prompt.
        output: Tokens of its answer.
        route: 0 to 1, for the choice of its replica.
    """

    gap: float
    prompt: int
    output: int
    route: float


class BatchWork(NamedTuple):
    """The rows of a batch, without end.

    Attributes:
        input: Tokens of a prompt.
        output: Tokens of an answer; the longest is the rows' `max_tokens`.
        tokens_per_s: Tokens of answers per second that the batch needs, at least.
    """

    input: TokenLengths
    output: TokenLengths
    tokens_per_s: float = 0.0


class StepGoals(NamedTuple):
    """Goals of live requests that bound the steps with rows: `batcher.goals`, in seconds."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


NO_GOALS = StepGoals()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come independently of each other, and of the answers before them (Poisson).

    Attributes:
        rate: Requests per second.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        max_tokens: `max_tokens` of each request, which the batcher reserves; answers are cut there.
        prefix_share: Share, 0 to 1, of a prompt that is in the prefix cache.
        batch: Rows that fill the capacity that these requests leave; None: there are no rows.
        goals: The goals that bound the steps with rows.
    """

    rate: float
    input: TokenLengths
    output: TokenLengths
    max_tokens: int
    prefix_share: float = 0.0
    batch: BatchWork | None = None
    goals: StepGoals = NO_GOALS

    @classmethod
    def of(
        cls,
        rate: float,
        input: TokenLengths,
        output: TokenLengths,
        max_tokens: int | None = None,
        prefix_share: float = 0.0,
    ) -> "Workload":
        """Return a workload; without `max_tokens`, requests ask for the length of the longest answer."""
        most = output.most if max_tokens is None else max_tokens
        return cls(rate, input, output.cut(min(output.most, most)), most, prefix_share)

    def step_s(self, profile: Profile) -> float:
        """Return the seconds of a step that is full of rows, within the goals."""
        longest = (profile.base_ms + profile.per_prefill_token_ms * profile.max_num_batched_tokens) / 1e3
        return min(longest, self.goals.tpot_s)

    def draws(self, seed: int) -> Iterator[Draw]:
        """Yield the random numbers of requests, without end."""
        numbers = random.Random(seed)
        while True:
            yield Draw(
                numbers.expovariate(1.0),
                self.input.draw(numbers),
                self.output.draw(numbers),
                numbers.random(),
            )

    def computed(self, prompt: int) -> int:
        """Return the tokens of a prompt that the engine computes: the tokens after the cached blocks."""
        cached = int(prompt * self.prefix_share) // BLOCK * BLOCK
        return max(1, prompt - cached)
