"""Rate and requests in flight of one key."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.errors import RequestError
from serve_app.auth.rate_limit import RateLimit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(clock: Clock, rate: int | None = None, most: int | None = None) -> RateLimit:
    rate_limit = RateLimit(clock)
    rate_limit.rate_per_minute, rate_limit.max_concurrency = rate, most
    return rate_limit


def retry_after(rate_limit: RateLimit) -> float:
    with pytest.raises(RequestError) as caught:
        rate_limit.enter()
    error = caught.value
    assert (error.status, error.type) == (429, "rate_limit_error")
    assert error.retry_after_s is not None
    return error.retry_after_s


def test_without_limits_there_are_none() -> None:
    rate_limit = made(Clock())
    for _ in range(1000):
        rate_limit.enter()
    assert rate_limit.in_flight == 1000


def test_a_minute_s_requests_may_come_at_once_and_the_next_has_a_hint() -> None:
    clock = Clock()
    rate_limit = made(clock, rate=6)
    for _ in range(6):
        rate_limit.leave(rate_limit.enter())
        clock.now += 1
    assert retry_after(rate_limit) == pytest.approx(54)
    clock.now += 53.9
    assert retry_after(rate_limit) == pytest.approx(0.1)
    clock.now += 0.11
    rate_limit.leave(rate_limit.enter())
    # The next of the six has its place a second later.
    assert retry_after(rate_limit) == pytest.approx(0.99)


@given(rate=st.integers(1, 200), steps=st.lists(st.floats(0, 30), max_size=60))
def test_no_minute_has_more_than_the_rate_and_the_hint_is_enough(rate: int, steps: list[float]) -> None:
    clock = Clock()
    rate_limit = made(clock, rate=rate)
    entered = []
    for step in steps:
        clock.now += step
        try:
            rate_limit.leave(rate_limit.enter())
        except RequestError as error:
            clock.now += (error.retry_after_s or 0.0) + 1e-6
            rate_limit.leave(rate_limit.enter())
        entered.append(clock.now)
    for start in entered:
        assert sum(start <= at < start + 60 for at in entered) <= rate


@given(rate=st.integers(1, 5), steps=st.lists(st.floats(0, 90), min_size=1, max_size=30))
def test_a_request_is_refused_only_if_the_minute_before_it_is_full(rate: int, steps: list[float]) -> None:
    clock = Clock()
    rate_limit = made(clock, rate=rate)
    entered: list[float] = []
    for step in steps:
        clock.now += step
        try:
            rate_limit.leave(rate_limit.enter())
        except RequestError:
            assert sum(at > clock.now - 60 for at in entered) == rate
        else:
            entered.append(clock.now)


def test_the_requests_in_flight_are_bounded_and_the_hint_follows_their_duration() -> None:
    clock = Clock()
    rate_limit = made(clock, most=2)
    entered = [rate_limit.enter(), rate_limit.enter()]
    assert retry_after(rate_limit) == pytest.approx(0.5)
    clock.now += 100
    rate_limit.leave(entered.pop())
    entered.append(rate_limit.enter())
    # One took 100 s; the mean moves towards it.
    assert retry_after(rate_limit) > 5
    assert rate_limit.in_flight == 2


def test_a_refused_request_takes_nothing_from_the_bucket() -> None:
    clock = Clock()
    rate_limit = made(clock, rate=60, most=1)
    entered = rate_limit.enter()
    for _ in range(100):
        retry_after(rate_limit)
    rate_limit.leave(entered)
    for _ in range(59):
        rate_limit.leave(rate_limit.enter())
    retry_after(rate_limit)


def test_a_changed_rate_holds_at_once_and_counts_what_was() -> None:
    clock = Clock()
    rate_limit = made(clock, rate=1000)
    for _ in range(3):
        rate_limit.leave(rate_limit.enter())
        clock.now += 10
    rate_limit.rate_per_minute = 2
    # Two of the three have to be a minute old: the second one is in 40 s.
    assert retry_after(rate_limit) == pytest.approx(40)
    rate_limit.rate_per_minute = 4
    rate_limit.leave(rate_limit.enter())
    assert retry_after(rate_limit) == pytest.approx(30)
    rate_limit.rate_per_minute = None
    rate_limit.leave(rate_limit.enter())


def test_a_time_of_day_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    rate_limit = made(clock, rate=1)
    rate_limit.leave(rate_limit.enter())
    for jump in (-3600.0, 3600.0):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, jump=jump: now + jump)
        assert retry_after(rate_limit) == pytest.approx(60)
    clock.now += 61
    rate_limit.leave(rate_limit.enter())
