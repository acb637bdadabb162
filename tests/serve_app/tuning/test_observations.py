"""The fit of a profile's parameters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tuning.profiling import PARAMETERS, ObservationError, Timing, fit

SHAPES = [
    *((tokens, 1, tokens, True) for tokens in (64, 256, 1024, 2048)),
    *((0, count, 60 * count, False) for count in (1, 4, 16, 32)),
    *((0, 8, 8 * context, False) for context in (2_000, 4_000)),
]


def observed(values: dict[str, float], noise: tuple[float, ...] = (1.0,), hidden: int = 0) -> list[Timing]:
    """Return the times that a device with these parameters has."""
    found = []
    for number, (prefill, sequences, context, request) in enumerate(SHAPES):
        factors = (1.0, max(0, prefill - hidden), sequences, context, request)
        time = sum(factor * values[name] for factor, name in zip(factors, PARAMETERS, strict=True))
        found.append(
            Timing(str(number), prefill, sequences, context, request, time * noise[number % len(noise)])
        )
    return found


TIMES = st.fixed_dictionaries(
    {
        "base_ms": st.floats(1, 100),
        "per_prefill_token_ms": st.floats(0.001, 1),
        "per_sequence_ms": st.floats(0.001, 1),
        "per_kv_token_ms": st.floats(1e-5, 1e-3),
        "request_ms": st.floats(0.1, 50),
    }
)


@given(TIMES)
def test_times_without_noise_give_the_parameters_back(values: dict[str, float]) -> None:
    found = fit(observed(values))
    assert found.parameters == pytest.approx(values, rel=1e-4)
    assert found.r2 == pytest.approx(1)
    assert found.largest_error < 1e-6
    assert not found.bad


VALUES = {
    "base_ms": 10.0,
    "per_prefill_token_ms": 0.03,
    "per_sequence_ms": 0.04,
    "per_kv_token_ms": 0.00004,
    "request_ms": 6.0,
}


@given(st.lists(st.floats(0.9, 1.1), min_size=10, max_size=10))
def test_no_parameter_is_negative(noise: list[float]) -> None:
    found = fit(observed(VALUES | {"per_sequence_ms": 0.0, "request_ms": 0.0}, tuple(noise)))
    assert min(found.parameters.values()) >= 0
    assert found.largest_error < 0.3


def test_a_device_that_the_parameters_do_not_describe_is_told() -> None:
    found = fit(observed(VALUES, (1.0, 1.6, 0.7)))
    assert found.bad
    assert found.largest_error > 0.15


def test_tokens_that_hide_behind_the_weights_are_a_knee() -> None:
    found = fit(observed(VALUES, (1.0, 1.01, 0.99), hidden=256))
    assert found.hidden == 256
    assert found.parameters["per_prefill_token_ms"] == pytest.approx(0.03, rel=0.05)
    assert fit(observed(VALUES, (1.0, 1.01, 0.99))).hidden == 0


def test_observations_that_are_alike_are_refused() -> None:
    rows = observed(VALUES)
    with pytest.raises(ObservationError, match="too few, or too much alike"):
        fit(rows[:4])
    with pytest.raises(ObservationError, match="too few, or too much alike"):
        fit([rows[0]] * 20)
    with pytest.raises(ObservationError):
        fit([])
