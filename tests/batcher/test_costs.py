"""What a record costs, and what is learned about outputs."""

import random
from typing import Any

import pytest

from batcher import OutputEstimator
from batcher.costs import cost_of, whole_cost


class Whole:
    """Like the whole numbers of numpy: not an int, but as good as one."""

    def __index__(self) -> int:
        return 12


@pytest.mark.parametrize(("value", "cost"), [(3, 3), (0, 0), (2.1, 3), (4.0, 4), (Whole(), 12)])
def test_costs_are_whole_numbers_rounded_up(value: Any, cost: int) -> None:
    assert whole_cost("cost", value) == cost


@pytest.mark.parametrize("value", [-1, -0.5 - 1, float("nan"), float("inf"), "5", None, [1], True])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"cost must be a finite number >= 0, not"):
        whole_cost("cost", value)


def test_an_attribute_that_is_no_method_is_not_an_estimate() -> None:
    class Record:
        estimate_cost = 5

    assert cost_of(None, ("estimate_cost",), 3, Record()) == 3


def test_the_first_estimates_are_the_most_there_can_be() -> None:
    outputs = OutputEstimator()
    for _ in range(OutputEstimator.ENOUGH - 1):
        outputs.learn(10)
    assert outputs.expect(1000) == 1000
    outputs.learn(10)
    assert outputs.expect(1000) == 10
    assert outputs.expect(5) == 5


def test_the_estimate_follows_a_change() -> None:
    outputs = OutputEstimator()
    for _ in range(3000):
        outputs.learn(100)
    for _ in range(3 * OutputEstimator.MEMORY):
        outputs.learn(500)
    assert 450 < outputs.expect(1000) <= 500


def test_the_estimate_grows_with_what_was_produced() -> None:
    rng = random.Random(1)
    outputs = OutputEstimator()
    for _ in range(1000):
        outputs.learn(int(rng.lognormvariate(5, 1)))
    estimates = [outputs.expect(10_000, so_far) for so_far in (0, 100, 500, 2000)]
    assert estimates == sorted(estimates)
    assert all(estimate > so_far for estimate, so_far in zip(estimates, (0, 100, 500, 2000), strict=True))


def test_beyond_everything_seen_the_estimate_doubles() -> None:
    outputs = OutputEstimator()
    for _ in range(100):
        outputs.learn(10)
    assert outputs.expect(10_000, 700) == 1400
    assert outputs.expect(1000, 700) == 1000
    outputs.learn(2**40)
    assert outputs.expect(1000) == 1000
