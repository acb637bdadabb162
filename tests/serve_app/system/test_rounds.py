"""Rounds that go on after a failure, and are missed when they don't."""

import asyncio
import logging

import pytest

from serve_app.system.rounds import SILENT_S, Reporter, Rounds
from tests.fakes.clock import Clock
from tests.progress import STILL_S


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


def test_a_report_that_fails_is_logged_once_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def fails() -> None:
        called.append("fails")
        raise ValueError("no")

    reporter = Reporter(fails, lambda: called.append("works"))
    reporter.report()
    reporter.report()
    assert called == ["fails", "works"] * 2
    (record,) = caplog.records
    assert (record.levelname, record.exc_info is not None) == ("ERROR", True)


async def test_it_reports_until_it_is_stopped_and_once_more() -> None:
    rounds = 0
    thrice = asyncio.Event()

    def count() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            thrice.set()

    reporter = Reporter(count, interval_s=0.001).start()
    await asyncio.wait_for(thrice.wait(), STILL_S)
    reporter.stop()
    after = rounds
    reporter.stop()
    await asyncio.sleep(0.01)
    assert rounds == after
