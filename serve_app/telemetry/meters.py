"""The instruments behind the metrics: Ray Serve's, which Ray exports to Prometheus."""

from collections.abc import Callable, Iterable

from ray.serve.metrics import Counter, Gauge

from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram, Record


def instrument(metric: Metric) -> Record:
    """Return what records a metric in this replica."""
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, metric.labels).inc  # type: ignore[arg-type]
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.help, metric.labels).set  # type: ignore[arg-type]
    return Histogram(metric, instrument)


class Meters:
    """Instruments by metric. A call costs some 3 µs: nothing to do per token.

    Args:
        metrics: Those that will be used.
        make: Makes the instrument of a metric.
    """

    def __init__(self, metrics: Iterable[Metric], make: Callable[[Metric], Record] = instrument) -> None:
        self._records = {metric.name: make(metric) for metric in metrics}
        self._totals: dict[tuple[str, ...], float] = {}

    def record(self, metric: Metric, value: float, *labels: str) -> None:
        """Record one value.

        Args:
            metric: The metric.
            value: What a counter grows by, more than 0; what a gauge is; what a histogram observes.
            labels: The values of its labels, in their order.
        """
        self._records[metric.name](value, dict(zip(metric.labels, labels, strict=True)))

    def count(self, metric: Metric, total: float, *labels: str) -> None:
        """Bring a counter to what something else has counted so far."""
        key = (metric.name, *labels)
        grown = total - self._totals.get(key, 0.0)
        if grown > 0:
            self._totals[key] = total
            self.record(metric, grown, *labels)

    def report(self) -> None:
        """Tell what histograms have taken in since the last call."""
        for record in self._records.values():
            if isinstance(record, Histogram):
                record.report()
