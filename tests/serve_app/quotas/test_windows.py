"""Windows of the calendar, and a clock that stays in order whatever the wall clock does."""

from datetime import UTC, datetime
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.quotas.windows import WindowClock, window_at

Span = Literal["minute", "day", "month"]
SPANS: tuple[Span, ...] = ("minute", "day", "month")
TIMES = st.floats(0, 4e9, allow_nan=False)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("span", "time", "first", "end"),
    [
        ("minute", "2026-02-28T23:59:59.9", "2026-02-28T23:59", "2026-03-01T00:00"),
        ("day", "2026-02-28T23:59:59.9", "2026-02-28", "2026-03-01"),
        ("month", "2028-02-29T12:00", "2028-02-01", "2028-03-01"),
        ("month", "2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
    ],
)
def test_a_window_is_one_of_the_calendar(span: Span, time: str, first: str, end: str) -> None:
    assert window_at(span, at(time)) == (span, at(first), at(end))


@given(st.sampled_from(SPANS), TIMES)
def test_windows_follow_one_another_without_a_gap(span: Span, time: float) -> None:
    window = window_at(span, time)
    assert window.starts_at <= time < window.ends_at
    assert window_at(span, window.ends_at).starts_at == window.ends_at
    assert window_at(span, window.starts_at) == window


class Clocks:
    """The two clocks of a machine, which a test moves."""

    def __init__(self, wall: float = 1_000_000.0) -> None:
        self.wall = wall
        self.monotonic = 50.0

    def pass_s(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def clock(self, not_before: float = 0.0) -> WindowClock:
        return WindowClock(lambda: self.wall, lambda: self.monotonic, not_before)


def test_the_clock_follows_the_wall_clock() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    for seconds in (0.1, 100, 3600):
        clocks.pass_s(seconds)
        assert clock.now() == clocks.wall
    clocks.wall += 0.5
    assert clock.now() == clocks.wall, "an ordinary correction"


def test_a_jump_ahead_that_is_undone_changes_nothing() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    clocks.wall += 3600
    for _ in range(3):
        clocks.pass_s(10)
        assert clock.now() == pytest.approx(clocks.wall - 3600)
    clocks.wall -= 3600
    assert clock.now() == pytest.approx(clocks.wall)


def test_a_jump_ahead_that_lasts_is_followed() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    clocks.wall += 3600
    clock.now()
    clocks.pass_s(60.0)
    assert clock.now() == clocks.wall


def test_a_clock_that_was_set_back_is_waited_for_at_half_speed() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    before = clock.now()
    clocks.wall -= 100
    assert clock.now() == before
    clocks.pass_s(60)
    assert clock.now() == before + 30
    clocks.pass_s(1000)
    assert clock.now() == clocks.wall


def test_a_new_process_goes_on_where_the_last_one_was() -> None:
    clocks = Clocks()
    clock = clocks.clock(not_before=clocks.wall + 10)
    assert clock.now() == clocks.wall + 10


@given(st.lists(st.tuples(st.floats(0, 200), st.sampled_from([0.0, 0.0, 0.5, 90.0, -90.0, 1e5, -1e5]))))
def test_time_never_goes_back_and_moves_with_the_monotonic_clock(moves: list[tuple[float, float]]) -> None:
    clocks = Clocks(1e9)
    clock = clocks.clock()
    last = clock.now()
    for seconds, jump in moves:
        clocks.pass_s(seconds)
        clocks.wall += jump
        now = clock.now()
        assert now >= last + seconds / 2 - 1e-6
        last = now
