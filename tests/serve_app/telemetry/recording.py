"""Instruments that remember what they were told."""

from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Record

Labels = tuple[str, ...]


class Instruments:
    """Makes instruments.

    Attributes:
        told: Every value, by the name of the metric and the values of its labels.
    """

    def __init__(self) -> None:
        self.told: dict[tuple[str, Labels], list[float]] = {}

    def make(self, metric: Metric) -> Record:
        def record(value: float, labels: dict[str, str]) -> None:
            assert tuple(labels) == metric.labels
            if metric.kind == "counter":
                # Ray refuses anything else.
                assert value > 0
            self.told.setdefault((metric.name, tuple(labels.values())), []).append(value)

        return record

    def of(self, metric: Metric, *labels: str) -> list[float]:
        """Return the values that a series was told."""
        return self.told.get((metric.name, labels), [])

    def total(self, metric: Metric, *labels: str) -> float:
        """Return what a counter shows."""
        return sum(self.of(metric, *labels))

    def series(self, metric: Metric) -> set[Labels]:
        """Return the labels of the series of a metric."""
        return {labels for name, labels in self.told if name == metric.name}
