"""Telemetry of an Ingress replica: metrics, request log and spans."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from serve_app.api.headers import Headers
from serve_app.api.scheduling import Scheduling
from serve_app.settings.telemetry import TelemetrySettings
from serve_app.system.rounds import Reporter
from serve_app.telemetry import catalogue
from serve_app.telemetry.faults import FaultCount
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.request_log import RequestLog, serve_logs
from serve_app.telemetry.request_tracker import RequestTracker, TrackedRequest
from serve_app.telemetry.requests import RequestMetrics


class IngressTelemetry:
    """Metrics, request log and spans of the requests to an Ingress replica.

    Args:
        settings: What to export.
        replica: The replica's id, for the name of its log file.

    Attributes:
        lost_calls: Calls that were lost with the process of their engine, by model.
    """

    def __init__(self, settings: TelemetrySettings, replica: str) -> None:
        reports: list[Callable[[list[TrackedRequest]], None]] = []
        jobs: list[Callable[[], None]] = []
        self._stop: list[Callable[[], None]] = []
        self.lost_calls: Counter[str] = Counter()
        begin = None
        self._pass_on: Callable[[TrackedRequest, Headers], Headers] | None = None
        if settings.metrics:
            meters = Meters(catalogue.INGRESS)
            faults = FaultCount()
            self._stop.append(faults.stop)
            jobs.append(lambda: faults.report(meters))
            jobs.append(lambda: meters.count_all(catalogue.LOST_CALLS, self.lost_calls))
            reports.append(RequestMetrics(meters))
            jobs.append(lambda: meters.record(catalogue.IN_PROGRESS, self.tracker.under_way))
            jobs.append(meters.report)
        if settings.traces is not None:
            # OpenTelemetry is imported only where spans are made.
            from serve_app.telemetry.tracing import Tracing, pass_on, provider

            tracing = Tracing(provider(settings.traces))
            begin = tracing.begin
            reports.append(tracing.end)
            self._stop.append(tracing.stop)
            self._pass_on = pass_on
        if settings.request_log is not None and (folder := serve_logs()):
            log = RequestLog(folder, replica, settings.request_log)
            reports.append(log)
            self._stop.append(log.close)
        self.tracker = RequestTracker(reports, begin)
        self._reporter = Reporter(self.tracker, *jobs)

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncGenerator[None, None]:
        """Report while the application runs."""
        self._reporter.start()
        try:
            yield
        finally:
            self._reporter.stop()
            for stop in self._stop:
                stop()

    def assign(
        self, request: TrackedRequest, model: str, scheduling: Scheduling, headers: Headers
    ) -> Headers:
        """Note the model of a request; return the headers to send to the model's Engine."""
        request.assign(model, scheduling)
        return headers if self._pass_on is None else self._pass_on(request, headers)
