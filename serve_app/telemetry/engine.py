"""Telemetry of an Engine replica: the metrics of its batcher."""

from collections.abc import Callable
from typing import Any

from batcher import ContinuousBatcher, DynamicBatcher
from serve_app.settings.telemetry import TelemetrySettings
from serve_app.system.rounds import Reporter
from serve_app.telemetry.batchers import BatcherMetrics, metrics_of
from serve_app.telemetry.faults import FaultCount
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.tenants import TenantLabels


class EngineTelemetry:
    """Metrics of an Engine replica. Reporting begins at once, on the running loop.

    Args:
        settings: What to export.
        model: The model's id.
        batcher: The model's batcher.
        more: Factories of further jobs, which are called once a second; each gets the instruments.
        tick: Called once a second, whatever is exported.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        model: str,
        batcher: ContinuousBatcher | DynamicBatcher[Any, Any],
        *more: Callable[[Meters], Callable[[], None]],
        tick: Callable[[], None] | None = None,
    ) -> None:
        self._faults = None
        jobs = [] if tick is None else [tick]
        if settings.metrics:
            meters = Meters(metrics_of(batcher))
            self._faults = faults = FaultCount()
            jobs.append(lambda: faults.report(meters))
            jobs.append(BatcherMetrics(model, batcher, meters, TenantLabels(settings.tenants)))
            jobs += [make(meters) for make in more]
            jobs.append(meters.report)
        self._reporter = Reporter(*jobs).start()

    def stop(self) -> None:
        """Report once more, and stop."""
        self._reporter.stop()
        if self._faults is not None:
            self._faults.stop()
