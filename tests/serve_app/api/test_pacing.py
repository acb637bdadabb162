"""Waits between retries, and limits on concurrent calls."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.pacing import Auto, Backoff, Fixed


@given(st.integers(1, 2000), st.none() | st.floats(0, 600))
def test_a_wait_is_bounded_and_no_shorter_than_asked(failures: int, asked: float | None) -> None:
    wait = Backoff(0.5, 30.0).wait_s(failures, asked)
    assert wait >= (asked or 0.0)
    assert wait >= 0.25
    assert wait <= max(30.0, 1.25 * (asked or 0.0))


def test_waits_double() -> None:
    waits = [Backoff(1.0, 1000.0).wait_s(failures) for failures in range(1, 8)]
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits))


def test_a_fixed_limit_stays() -> None:
    fixed = Fixed(7)
    fixed.refused(1.0)
    fixed.observe(0, 0)
    assert fixed.limit == 7


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_auto_grows_while_too_little_waits() -> None:
    adaptive = Auto(first=4, most=20, clock=Clock())
    adaptive.observe(0, 0)
    assert adaptive.limit == 4, "nothing has been answered yet"
    adaptive.answered()
    limits = []
    for _ in range(12):
        adaptive.observe(64, 10)
        limits.append(adaptive.limit)
    assert limits == sorted(limits)
    assert limits[-1] == 20


def test_auto_shrinks_while_too_much_waits_and_keeps_the_limit_in_between() -> None:
    adaptive = Auto(first=8, clock=Clock())
    adaptive.answered()
    adaptive.observe(64, 100)
    assert adaptive.limit == 8
    adaptive.observe(64, 400)
    assert adaptive.limit == 7


def test_auto_halves_once_for_the_429s_of_one_moment() -> None:
    clock = Clock()
    adaptive = Auto(first=16, clock=clock)
    adaptive.answered()
    for _ in range(10):
        adaptive.refused(5.0)
    adaptive.observe(1, 0)
    assert adaptive.limit == 8
    clock.now = 5.1
    adaptive.refused(None)
    assert adaptive.limit == 4
    for _ in range(10):
        clock.now += 10
        adaptive.refused(None)
    assert adaptive.limit == 1


def test_auto_finds_the_capacity_of_a_service() -> None:
    # The service runs 64 records at once; a call has 50.
    adaptive = Auto(clock=Clock())
    adaptive.answered()
    for _ in range(100):
        inside = adaptive.limit * 50
        adaptive.observe(min(64, inside), max(0, inside - 64))
    assert 64 <= adaptive.limit * 50 <= 64 * 5
