"""Rounds of the reporter, and jobs that fail."""

import asyncio

import pytest

from serve_app.telemetry.reporter import Reporter
from tests.progress import STILL_S


def test_a_job_that_fails_is_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
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
