"""Measured times of a device, and the fit of a profile's parameters to them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PARAMETERS = (
    "base_ms",
    "per_prefill_token_ms",
    "per_sequence_ms",
    "per_kv_token_ms",
    "request_ms",
)
"""Parameters of a profile that are fitted."""

LEAST_R2 = 0.98
LARGEST_ERROR = 0.15
"""Beyond these, a fit is called bad."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time: of a step, or of a request until its first token.

    Attributes:
        about: A short description.
        prefill_tokens: Tokens of prompts that were computed.
        sequences: Sequences in the step.
        kv_tokens: Tokens of context that were read.
        request: Whether it is the time of a request, with its way to the engine.
        milliseconds: The time.
        spread: Largest of the repeated times divided by the smallest; 1 for one.
    """

    about: str
    prefill_tokens: float
    sequences: float
    kv_tokens: float
    request: bool
    milliseconds: float
    spread: float = 1.0

    def row(self) -> tuple[float, ...]:
        """Return the factors of the parameters, in the order of `PARAMETERS`."""
        return 1.0, self.prefill_tokens, self.sequences, self.kv_tokens, float(self.request)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted parameters.

    Attributes:
        parameters: By name, in milliseconds.
        predicted: Milliseconds of each observation with them.
        r2: Share of the variance of the times that they explain.
        largest_error: Largest relative difference between an observation and its prediction.
    """

    parameters: Mapping[str, float]
    predicted: Sequence[float]
    r2: float
    largest_error: float

    @property
    def bad(self) -> bool:
        """True if the parameters don't describe what was measured."""
        return self.r2 < LEAST_R2 or self.largest_error > LARGEST_ERROR


class ObservationError(ValueError):
    """The observations don't determine the parameters."""


def fit(observations: Sequence[Observation]) -> Fit:
    """Return the parameters of at least 0 whose relative squared errors are the least.

    Relative ones, since a step of 10 ms says as much as a prompt of 500 ms.

    Args:
        observations: Times of steps and of requests.

    Raises:
        ObservationError: They don't determine the parameters: too few, or all alike.
    """
    times = np.array([each.milliseconds for each in observations])
    factors = np.array([each.row() for each in observations], dtype=float).reshape(-1, len(PARAMETERS))
    if (times <= 0).any():
        raise ObservationError("a measured time is not above 0")
    weighted = factors / times[:, None]
    # Columns of the same size, so that the rank can be told.
    sizes = np.linalg.norm(weighted, axis=0)
    if (sizes == 0).any() or np.linalg.matrix_rank(weighted / sizes, tol=1e-6) < len(PARAMETERS):
        raise ObservationError(
            "the observations are too few, or too much alike, to tell the parameters apart"
        )
    found = _not_negative(weighted / sizes, np.ones(len(times))) / sizes
    predicted = factors @ found
    rest = float(((times - predicted) ** 2).sum())
    total = float(((times - times.mean()) ** 2).sum())
    return Fit(
        dict(zip(PARAMETERS, found.tolist(), strict=True)),
        predicted.tolist(),
        1 - rest / total if total else 1.0,
        float(np.abs(predicted / times - 1).max()),
    )


def _not_negative(factors: "np.ndarray", times: "np.ndarray") -> "np.ndarray":
    """Return the solution of least squares without negative numbers.

    Some parameters of it are 0, and the others are an ordinary solution: with five parameters, all choices of
    those can be tried.
    """
    count = factors.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for kept in itertools.combinations(range(count), size):
            columns = list(kept)
            part, *_ = np.linalg.lstsq(factors[:, columns], times, rcond=None)
            error = float(((factors[:, columns] @ part - times) ** 2).sum())
            if (part >= 0).all() and error < least:
                least = error
                best = np.zeros(count)
                best[columns] = part
    return best
