"""Jobs of an Engine replica's telemetry."""

import asyncio
from collections.abc import Callable

from batcher import ContinuousBatcher
from serve_app.settings.telemetry import SILENT, TelemetrySettings
from serve_app.telemetry.engine import EngineTelemetry
from serve_app.telemetry.meters import Meters
from tests.progress import STILL_S


async def test_without_telemetry_there_are_no_jobs() -> None:
    def job(meters: Meters) -> Callable[[], None]:
        raise AssertionError("there are no instruments")

    async with ContinuousBatcher(capacity=10) as batcher:
        telemetry = EngineTelemetry(SILENT, "m", batcher, job)
        telemetry.stop()


async def test_further_jobs_are_called_until_the_end() -> None:
    called = asyncio.Event()
    calls = 0

    def job(meters: Meters) -> Callable[[], None]:
        def count() -> None:
            nonlocal calls
            calls += 1
            called.set()

        return count

    async with ContinuousBatcher(capacity=10) as batcher:
        telemetry = EngineTelemetry(TelemetrySettings(), "m", batcher, job)
        await asyncio.wait_for(called.wait(), STILL_S)
        before = calls
        telemetry.stop()
        assert calls == before + 1
