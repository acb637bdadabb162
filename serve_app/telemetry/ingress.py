"""The telemetry of an Ingress replica: its metrics, its request log, its spans."""

from collections.abc import AsyncGenerator, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.middleware import Middleware

from serve_app.api.scheduling import Scheduling
from serve_app.settings.schema import TelemetrySettings
from serve_app.telemetry import catalogue
from serve_app.telemetry.accounts import Account, Accounting, Accounts, account_of
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.reporter import Reporter
from serve_app.telemetry.request_log import RequestLog, serve_logs
from serve_app.telemetry.requests import RequestMetrics

Headers = list[tuple[bytes, bytes]]


class IngressTelemetry:
    """What an Ingress replica tells of the requests that it answers.

    Args:
        settings: What to tell.
        replica: The replica's id, for the name of its log file.
    """

    def __init__(self, settings: TelemetrySettings, replica: str) -> None:
        reports: list[Callable[[list[Account]], None]] = []
        jobs: list[Callable[[], None]] = []
        self._stop: list[Callable[[], None]] = []
        begin = None
        self._pass_on: Callable[[Account, Headers], Headers] | None = None
        if settings.metrics:
            meters = Meters(catalogue.INGRESS)
            reports.append(RequestMetrics(meters))
            jobs.append(lambda: meters.record(catalogue.IN_PROGRESS, self.accounts.under_way))
            jobs.append(meters.report)
        if settings.traces is not None:
            # Imported where spans are made and nowhere else.
            from serve_app.telemetry.tracing import Tracing, pass_on

            tracing = Tracing(settings.traces)
            begin = tracing.begin
            reports.append(tracing.end)
            self._stop.append(tracing.stop)
            self._pass_on = pass_on
        if settings.request_log is not None and (folder := serve_logs()):
            log = RequestLog(folder, replica, settings.request_log)
            reports.append(log)
            self._stop.append(log.close)
        self.accounts = Accounts(reports, begin)
        self.middleware = Middleware(Accounting, accounts=self.accounts)
        self._reporter = Reporter(self.accounts, *jobs)

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncGenerator[None, None]:
        """Report as long as the application runs."""
        self._reporter.start()
        try:
            yield
        finally:
            self._reporter.stop()
            for stop in self._stop:
                stop()

    def assign(
        self, scope: MutableMapping[str, Any], model: str, scheduling: Scheduling, headers: Headers
    ) -> Headers:
        """A request goes to a model; return the headers that go with it."""
        account = account_of(scope)
        account.assign(model, scheduling)
        return headers if self._pass_on is None else self._pass_on(account, headers)
