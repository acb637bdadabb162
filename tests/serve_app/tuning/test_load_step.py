"""A load step: what requests say about goals."""

import math

import pytest

from serve_app.tuning.goals import parse_goals
from serve_app.tuning.load import LoadLevel, LoadStep, is_clear, is_hopeless
from serve_app.tuning.service import LoadAnswer

GOALS = parse_goals("ttft_p90<1,tpot_p90<0.1")
WINDOW = (10.0, 20.0)


def answers(count: int, ttft: float = 0.5, tpot: float = 0.05, begin: float = 10.0) -> list[LoadAnswer]:
    """Return answers of 11 tokens that are sent evenly in the window."""
    sent = [begin + (20.0 - begin) * number / count for number in range(count)]
    return [LoadAnswer(at, 11, at + ttft, at + ttft + 10 * tpot) for at in sent]


def step(found: list[LoadAnswer], load: LoadLevel | None = None, now: float = 30.0) -> LoadStep:
    return LoadStep.of(load or LoadLevel("open", 10.0), GOALS, found, WINDOW, began_at=5.0, now=now)


def test_the_figures_are_those_of_the_requests_in_the_window() -> None:
    warm_up = [LoadAnswer(9.0, 11, 99.0, 99.0), LoadAnswer(20.0, 11, 99.0, 99.0)]
    found = step([*answers(100), *warm_up])
    assert found.sent == 100
    assert found.figure("ttft", 90) == pytest.approx(0.5)
    assert found.figure("tpot", 90) == pytest.approx(0.05)
    assert found.figure("latency", 50) == pytest.approx(1.0)
    assert found.holds
    assert (found.rate, found.goodput, found.spent_s) == (10.0, 10.0, 25.0)
    # The answers to requests of the last second end after the window.
    assert (found.ended, found.ended_per_s, found.tokens_per_s) == (90, 9.0, 99.0)
    # An answer takes a second, ten are sent in one, and two others run all the time.
    assert found.in_flight == pytest.approx(10 + 1, abs=0.6)


def test_a_goal_breaks_where_more_miss_it_than_it_allows() -> None:
    assert step([*answers(91), *answers(9, ttft=3.0)]).holds
    found = step([*answers(85), *answers(15, ttft=3.0)])
    assert [goal.name for goal in found.misses] == ["ttft_p90"]
    assert found.goodput == pytest.approx(8.5)
    # What fails misses everything.
    failed = answers(15)
    for each in failed:
        each.failed = True
    found = step([*answers(85), *failed])
    assert len(found.misses) == 2
    assert math.isinf(found.figure("ttft", 99))
    assert found.failed == 15


def test_requests_that_are_cut_off_count_if_they_have_missed_a_goal() -> None:
    # At 20.5 those that were sent before 19.5 have waited for more than a second.
    silent = [LoadAnswer(each.sent_at, 11) for each in answers(100)]
    found = step(silent, now=20.5)
    assert len(found.samples["ttft"]) == 96
    assert found.samples["tpot"] == []
    assert not found.holds
    # Of a token that has come the pace is known as far as it can only be slower.
    slow = [LoadAnswer(each.sent_at, 11, each.sent_at + 0.1) for each in answers(100)]
    found = step(slow, now=22.0)
    assert len(found.samples["tpot"]) > 80
    assert [goal.name for goal in found.misses] == ["tpot_p90"]


def test_a_service_that_falls_behind_does_not_hold() -> None:
    # Each answer takes longer than the one before, below the bounds.
    growing = [LoadAnswer(each.sent_at, 1, each.sent_at, each.sent_at) for each in answers(300)]
    for number, each in enumerate(growing):
        each.ended_at = each.sent_at + 0.03 * number
        each.first_at = each.sent_at + 0.9
    found = step(growing, now=40.0)
    assert found.growing
    assert not found.holds
    assert not step(answers(300), now=40.0).growing
    assert not step(growing, LoadLevel("closed", 10), now=40.0).growing


def test_two_steps_count_as_one() -> None:
    both = step(answers(100)).merged(step(answers(50, ttft=3.0)))
    assert both.sent == 150
    assert both.seconds == 20.0
    assert both.figure("ttft", 99) == pytest.approx(3.0)
    assert [goal.name for goal in both.misses] == ["ttft_p90"]


@pytest.mark.parametrize(("late", "unclear"), [(0, False), (4, False), (8, True), (15, True), (25, False)])
def test_a_step_close_to_a_bound_is_unclear(late: int, unclear: bool) -> None:
    assert step([*answers(100 - late), *answers(late, ttft=3.0)]).unclear is unclear


@pytest.mark.parametrize(("late", "unclear"), [(140, False), (150, True), (250, True), (260, False)])
def test_a_step_of_many_requests_is_unclear_only_where_chance_may_decide(late: int, unclear: bool) -> None:
    """A tenth of 2,000 may be late, and four standard deviations are 54."""
    assert step([*answers(2_000 - late), *answers(late, ttft=3.0)]).unclear is unclear


def test_a_step_is_hopeless_once_too_many_are_late() -> None:
    silent = [LoadAnswer(each.sent_at, 11) for each in answers(100)]
    assert not is_hopeless(silent, GOALS, WINDOW, expected=100, now=12.0)
    assert is_hopeless(silent, GOALS, WINDOW, expected=100, now=14.0)
    # As many are few among those that are still to come.
    assert not is_hopeless(silent, GOALS, WINDOW, expected=1_000, now=14.0)
    assert not is_hopeless(answers(100), GOALS, WINDOW, expected=100, now=30.0)


def test_a_closed_loop_is_clear_once_many_have_held_the_goals() -> None:
    clients, rate = LoadLevel("closed", 10), LoadLevel("open", 10.0)

    def clear(found: list[LoadAnswer], load: LoadLevel = clients, now: float = 30.0) -> bool:
        return is_clear(load, found, GOALS, WINDOW, now)

    # A tenth may be late: half of that, less three, may have been.
    assert clear(answers(60))
    assert not clear(answers(59))
    assert clear([*answers(98), *answers(2, ttft=3.0)])
    assert not clear([*answers(97), *answers(3, tpot=0.5)])
    # Those that still run have held nothing.
    assert not clear([LoadAnswer(10.0, 11)] * 1_000, now=10.5)
    # A queue may grow slowly.
    assert not clear(answers(10_000), rate)
