"""Metrics of the requests to the Ingress."""

from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.request_tracker import TrackedRequest

NO_MODEL = "none"
"""Label of requests that reached no model: a client could make a new series with each name."""


class RequestMetrics:
    """Records the metrics of requests that have ended.

    Args:
        meters: Instruments of `catalogue.INGRESS`.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def __call__(self, ended: list[TrackedRequest]) -> None:
        """Record the metrics of requests."""
        for request in ended:
            if request.reportable:
                self._record(request)

    def _record(self, request: TrackedRequest) -> None:
        record = self._meters.record
        model = request.model or NO_MODEL
        outcome = request.outcome
        record(catalogue.REQUESTS, 1, model, outcome, str(request.status))
        if outcome != "ok" or not request.model:
            return
        record(catalogue.REQUEST_SECONDS, request.seconds, model, "yes" if request.streams else "no")
        usage = request.usage
        if request.streams:
            first_s = request.first_at - request.started_at
            record(catalogue.FIRST_TOKEN, first_s, model)
            if usage and usage.counted.output > 1:
                per_token_s = (request.seconds - first_s) / (usage.counted.output - 1)
                record(catalogue.PER_TOKEN, per_token_s, model)
        if usage and usage.engine_s:
            record(catalogue.PATH_SECONDS, max(request.seconds - usage.engine_s, 0.0), model)
