"""The rate of service by Little's law."""

import pytest

from batcher.service_rate import MEMORY, ServiceRate


def test_nothing_is_known_before_the_first_record() -> None:
    rate = ServiceRate()
    assert rate.time_to_serve(1, 1, 1, 1) is None
    rate.learn(5, 2.0)
    assert rate.time_to_serve(1, 5, 0, 0) is None


def test_records_and_cost_bound_the_rate() -> None:
    rate = ServiceRate()
    for _ in range(100):
        rate.learn(10, 2.0)
    # Four records of cost 10 inside, two seconds each: two records, or a cost of 20, in a second.
    assert rate.time_to_serve(6, 10, 4, 40) == pytest.approx(3.0)
    assert rate.time_to_serve(1, 80, 4, 40) == pytest.approx(4.0)
    assert rate.time_to_serve(0, -5, 4, 40) == 0.0


def test_the_mean_time_is_taken_by_cost() -> None:
    rate = ServiceRate()
    for _ in range(500):
        rate.learn(1, 1.0)
        rate.learn(99, 10.0)
    assert rate.time_to_serve(0, 100, 1, 100) == pytest.approx((1 + 990) / 100, rel=0.01)


def test_free_records_have_a_rate_too() -> None:
    rate = ServiceRate()
    rate.learn(0, 3.0)
    assert rate.time_to_serve(2, 0, 1, 0) == pytest.approx(6.0)


def test_the_past_fades() -> None:
    rate = ServiceRate()
    for _ in range(2000):
        rate.learn(1, 1.0)
    for _ in range(round(3 / (1 - MEMORY))):
        rate.learn(1, 9.0)
    assert rate.time_to_serve(1, 1, 1, 1) == pytest.approx(9.0, rel=0.1)
