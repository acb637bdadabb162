from hypothesis import given
from hypothesis import strategies as st

from serve_app.driver.pacing import Auto, Backoff, Fixed


@given(st.integers(1, 2000), st.none() | st.floats(0, 600))
def test_a_wait_is_bounded_and_no_shorter_than_asked(failures: int, asked: float | None) -> None:
    wait = Backoff(0.5, 30.0).wait_s(failures, asked)
    assert wait >= (asked or 0.0)
    assert wait >= 0.25
    assert wait <= max(30.0, 1.25 * (asked or 0.0))


def test_waits_double() -> None:
    waits = [Backoff(1.0, 1000.0).wait_s(failures) for failures in range(1, 8)]
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits))


def test_a_fixed_pace_stays() -> None:
    pace = Fixed(7)
    pace.refused(1.0)
    pace.saw(0, 0)
    assert pace.limit == 7


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_auto_grows_while_too_little_waits() -> None:
    pace = Auto(first=4, most=20, clock=Clock())
    pace.saw(0, 0)
    assert pace.limit == 4, "nothing has been answered yet"
    pace.answered()
    limits = []
    for _ in range(12):
        pace.saw(64, 10)
        limits.append(pace.limit)
    assert limits == sorted(limits)
    assert limits[-1] == 20


def test_auto_shrinks_while_too_much_waits_and_rests_between() -> None:
    pace = Auto(first=8, clock=Clock())
    pace.answered()
    pace.saw(64, 100)
    assert pace.limit == 8
    pace.saw(64, 400)
    assert pace.limit == 7


def test_auto_halves_once_for_the_429s_of_one_moment() -> None:
    clock = Clock()
    pace = Auto(first=16, clock=clock)
    pace.answered()
    for _ in range(10):
        pace.refused(5.0)
    pace.saw(1, 0)
    assert pace.limit == 8
    clock.now = 5.1
    pace.refused(None)
    assert pace.limit == 4
    for _ in range(10):
        clock.now += 10
        pace.refused(None)
    assert pace.limit == 1


def test_auto_finds_what_a_service_can_take() -> None:
    # A service that runs 64 records at once, from calls of 50.
    pace = Auto(clock=Clock())
    pace.answered()
    for _ in range(100):
        inside = pace.limit * 50
        pace.saw(min(64, inside), max(0, inside - 64))
    assert 64 <= pace.limit * 50 <= 64 * 5
