"""Instruments of the metrics: Ray Serve's instruments, which Ray exports to Prometheus."""

from collections.abc import Callable, Iterable, Mapping

from ray.serve.metrics import Counter, Gauge

from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram, Instrument


def instrument(metric: Metric) -> Instrument:
    """Return the instrument that records a metric in this replica."""
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, metric.labels).inc  # type: ignore[arg-type]
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.help, metric.labels).set  # type: ignore[arg-type]
    return Histogram(metric, instrument)


class Meters:
    """Instruments by metric. A call costs about 3 µs, too much for a call per token.

    Args:
        metrics: The metrics that will be recorded.
        make: Makes the instrument of a metric.
    """

    def __init__(self, metrics: Iterable[Metric], make: Callable[[Metric], Instrument] = instrument) -> None:
        self._records = {metric.name: make(metric) for metric in metrics}
        self._totals: dict[tuple[str, ...], float] = {}

    def record(self, metric: Metric, value: float, *labels: str) -> None:
        """Record one value.

        Args:
            metric: The metric.
            value: Increment of a counter, above 0; value of a gauge; observation of a histogram.
            labels: Values of the metric's labels, in their order. Ray takes ASCII alone: other characters
                are escaped.
        """
        self._records[metric.name](value, dict(zip(metric.labels, map(_escaped, labels), strict=True)))

    def count(self, metric: Metric, total: float, *labels: str) -> None:
        """Raise a counter to a total that is counted elsewhere."""
        key = (metric.name, *labels)
        grown = total - self._totals.get(key, 0.0)
        if grown > 0:
            self._totals[key] = total
            self.record(metric, grown, *labels)

    def count_all(self, metric: Metric, totals: Mapping[str, float]) -> None:
        """Raise a counter to its totals by its label."""
        for label, total in list(totals.items()):
            self.count(metric, total, label)

    def report(self) -> None:
        """Export the histograms."""
        for record in self._records.values():
            if isinstance(record, Histogram):
                record.report()


def _escaped(label: str) -> str:
    return label if label.isascii() else label.encode("ascii", "backslashreplace").decode()
