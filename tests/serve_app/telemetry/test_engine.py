"""Spans and jobs of an Engine replica."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from batcher import ContinuousBatcher
from serve_app.settings.telemetry import SILENT, TelemetrySettings, TraceSettings
from serve_app.telemetry.engine import EngineTelemetry
from serve_app.telemetry.meters import Meters
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Tokens, Usage
from tests.progress import STILL_S

REQUEST = RelayRequest("POST", "/generate", b"", [], b"")
USAGE = RequestUsage()
USAGE.add(Usage(1.0, 1.5, 2.0, Tokens(12, 0, 5)))


def span_names(folder: Path) -> list[str]:
    (file,) = folder.iterdir()
    return sorted(json.loads(line)["name"] for line in file.read_text().splitlines())


async def test_an_answered_request_has_spans(tmp_path: Path) -> None:
    traces = TraceSettings(endpoint=f"file://{tmp_path}")
    settings = TelemetrySettings(metrics=False, engine_metrics=False, traces=traces)
    async with ContinuousBatcher(capacity=10) as batcher:
        telemetry = EngineTelemetry(settings, "m", batcher)
        telemetry.answered(REQUEST, 1.0, USAGE)
        telemetry.stop()
    assert span_names(tmp_path) == ["engine", "generate", "handle", "queue"]


async def test_without_telemetry_there_are_no_jobs_and_no_spans() -> None:
    def job(meters: Meters) -> Callable[[], None]:
        raise AssertionError("there are no instruments")

    async with ContinuousBatcher(capacity=10) as batcher:
        telemetry = EngineTelemetry(SILENT, "m", batcher, job)
        telemetry.answered(REQUEST, 1.0, USAGE)
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
