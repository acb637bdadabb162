import pytest

from serve_app.jobs.pacing import WINDOW_S, Meter, Rate


def test_the_rate_is_that_of_the_last_minute_with_rows() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    assert rate.per_s == 0
    for second in range(200):
        now = float(second)
        rate.add(5 if second < 100 else 20)
    assert rate.total == 500 + 2000
    assert rate.per_s == pytest.approx(20, rel=0.05)
    now += 10 * WINDOW_S
    assert rate.per_s == pytest.approx(20, rel=0.05)


def test_one_group_of_rows_is_no_rate() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    rate.add(100)
    assert rate.per_s == 0


def test_a_rate_falls_while_no_rows_come() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    for second in range(11):
        now = float(second)
        rate.add(10)
    assert rate.per_s == pytest.approx(10)
    now = 20.0
    assert rate.per_s == pytest.approx(5)


def test_work_is_measured_only_while_rows_wait() -> None:
    now = 0.0
    meter = Meter(lambda: now)

    def look(waiting: bool) -> tuple[float, float]:
        nonlocal now
        now += 10.0
        meter.add(4, 40.0)
        return meter.look(waiting, 8)

    assert [look(False) for _ in range(3)] == [(0.0, 0.0)] * 3
    # The eight rows that were in flight when rows began to wait have to end first.
    assert [look(True) for _ in range(5)] == [(0.0, 0.0)] * 3 + [(40.0, 10.0)] * 2
    assert look(False) == (0.0, 0.0)
    assert look(True) == (0.0, 0.0)
