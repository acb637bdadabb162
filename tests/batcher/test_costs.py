"""What a record costs."""

from typing import Any

import pytest

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
