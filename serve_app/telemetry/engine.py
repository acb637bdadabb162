"""The telemetry of an Engine replica: its batcher's metrics, and the spans of what it answers."""

from collections.abc import Callable
from typing import Any

from batcher import ContinuousBatcher, DynamicBatcher
from serve_app.api.headers import Headers
from serve_app.relay.usage import RequestUsage
from serve_app.settings.schema import TelemetrySettings
from serve_app.telemetry.batchers import BatcherMetrics, metrics_of
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.reporter import Reporter
from serve_app.telemetry.tenants import Tenants


class EngineTelemetry:
    """What a replica tells of its model. It begins at once, on the running loop.

    Args:
        settings: What to tell.
        model: The model's id.
        batcher: Its batcher.
        more: Makes further jobs out of the instruments; called once a second each.
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
        jobs: list[Callable[[], None]] = []
        if settings.metrics:
            meters = Meters(metrics_of(batcher))
            jobs.append(BatcherMetrics(model, batcher, meters, Tenants(settings.tenants)))
            jobs += [make(meters) for make in more]
            jobs.append(meters.report)
        if settings.traces is not None:
            # Imported where spans are made and nowhere else.
            from serve_app.telemetry.tracing import Tracing

            self._tracing = Tracing(settings.traces)
        self._reporter = Reporter(*jobs).start()

    def answered(self, headers: Headers, began_at: float, usage: RequestUsage) -> None:
        """The engine has answered a request, or its client has left.

        Args:
            headers: Those of the request.
            began_at: When it came, on the clock of `time.monotonic`.
            usage: What it took.
        """
        if self._tracing is not None:
            self._tracing.engine(headers, self._model, began_at, usage)

    def stop(self) -> None:
        """Report for the last time."""
        self._reporter.stop()
        if self._tracing is not None:
            self._tracing.stop()
