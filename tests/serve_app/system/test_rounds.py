"""Rounds that go on after a failure, and are missed when they don't."""

import logging

import pytest

from serve_app.system.rounds import SILENT_S, Rounds
from tests.fakes.clock import Clock


def test_a_round_that_fails_is_logged_once_with_its_stack_and_the_next_one_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = Rounds("the look", clock=Clock())
    caplog.set_level(logging.INFO, "ray.serve")
    for work in (1, 0, 0, 1, 1, 0):
        with rounds.round():
            1 / work
    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        ("the look failed; it is tried again, and this is logged once", True),
        ("the look works again", False),
        ("the look failed; it is tried again, and this is logged once", True),
    ]
    assert "ZeroDivisionError" in caplog.text


def test_rounds_that_end_or_fail_for_too_long_are_missed() -> None:
    clock = Clock()
    rounds = Rounds("the look", clock=clock)
    clock.now += SILENT_S
    rounds.check()
    clock.now += 1
    with pytest.raises(RuntimeError, match="the look has not succeeded for 61 s"):
        rounds.check()
    with rounds.round():
        int("none")
    with pytest.raises(RuntimeError):
        rounds.check()
    with rounds.round():
        pass
    rounds.check()
