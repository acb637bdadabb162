"""The slope of a process in memory, as the soak reports it: without its first minute."""

import pytest

from tests.soak.memory import settled, slope


def test_lines_of_several_processes_at_any_level_have_one_slope() -> None:
    grows = [[(float(at), level + at / 3600 * 7) for at in range(0, 600, 10)] for level in (100, 900)]
    assert slope(grows) == pytest.approx(7)


def test_a_flat_line_has_none() -> None:
    assert slope([[(0.0, 5.0), (10.0, 5.0)]]) == 0
    assert slope([]) is None


def test_the_first_minute_of_a_process_does_not_count() -> None:
    assert settled([(1000.0, 1.0), (1059.0, 2.0), (1060.0, 3.0)]) == [(1060.0, 3.0)]
