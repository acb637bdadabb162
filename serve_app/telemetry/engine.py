"""Telemetry of an Engine replica: its batcher's metrics and its requests' spans."""

from collections.abc import Callable
from typing import Any

from batcher import ContinuousBatcher, DynamicBatcher
from serve_app.settings.telemetry import TelemetrySettings
from serve_app.telemetry.batchers import BatcherMetrics, metrics_of
from serve_app.telemetry.faults import FaultCount
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.reporter import Reporter
from serve_app.telemetry.tenants import TenantLabels
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage


class EngineTelemetry:
    """Metrics and spans of an Engine replica. Reporting begins at once, on the running loop.

    Args:
        settings: What to export.
        model: The model's id.
        batcher: The model's batcher.
        more: Factories of further jobs, which are called once a second; each gets the instruments.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        model: str,
        batcher: ContinuousBatcher | DynamicBatcher[Any, Any],
        *more: Callable[[Meters], Callable[[], None]],
    ) -> None:
        self._model = model
        self._tracing = None
        self._faults = None
        jobs: list[Callable[[], None]] = []
        if settings.metrics:
            meters = Meters(metrics_of(batcher))
            self._faults = faults = FaultCount()
            jobs.append(lambda: faults.report(meters))
            jobs.append(BatcherMetrics(model, batcher, meters, TenantLabels(settings.tenants)))
            jobs += [make(meters) for make in more]
            jobs.append(meters.report)
        if settings.traces is not None:
            # OpenTelemetry is imported only where spans are made.
            from serve_app.telemetry.tracing import Tracing

            self._tracing = Tracing(settings.traces)
        self._reporter = Reporter(*jobs).start()

    def answered(self, request: RelayRequest, began_at: float, usage: RequestUsage) -> None:
        """Make the spans of a request that was answered, or whose client has left.

        Args:
            request: The request.
            began_at: Time of arrival, on the clock of `time.monotonic`.
            usage: Tokens and times of the answer.
        """
        if self._tracing is not None:
            self._tracing.engine(request, self._model, began_at, usage)

    def stop(self) -> None:
        """Report once more, and stop."""
        self._reporter.stop()
        if self._faults is not None:
            self._faults.stop()
        if self._tracing is not None:
            self._tracing.stop()
