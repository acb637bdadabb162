"""Metrics of a run, from a driver in the service's cluster."""

from serve_app.driver.run_stats import RunStats
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters


class RunMetrics:
    """Records the statistics of a run as metrics.

    Args:
        model: Id of the model, for labels.
        meters: Instruments of `catalogue.DRIVER`; None: Ray's.
    """

    def __init__(self, model: str, meters: Meters | None = None) -> None:
        self._model = model
        self._meters = meters or Meters(catalogue.DRIVER)

    def __call__(self, stats: RunStats) -> None:
        """Record the statistics."""
        totals = stats.totals
        failed = totals.failed.total()
        count = self._meters.count
        count(catalogue.DRIVER_ROWS, totals.rows - failed, self._model, "done")
        count(catalogue.DRIVER_ROWS, failed, self._model, "failed")
        count(catalogue.DRIVER_TOKENS, totals.prompt_tokens + totals.completion_tokens, self._model)
        count(catalogue.DRIVER_RETRIES, stats.retries, self._model)
        self._meters.record(catalogue.DRIVER_CALLS, stats.in_flight, self._model)
