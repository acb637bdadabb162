"""Instruments that keep the values that they are given."""

from collections.abc import Callable

from serve_app.telemetry.catalogue import Metric

Labels = tuple[str, ...]


class Instruments:
    """Makes instruments.

    Attributes:
        values: Recorded values, by the name of the metric and the values of its labels.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[str, Labels], list[float]] = {}

    def make(self, metric: Metric) -> Callable[[float, dict[str, str]], None]:
        def record(value: float, labels: dict[str, str]) -> None:
            assert tuple(labels) == metric.labels
            # Ray refuses other labels.
            assert "".join(labels.values()).isascii()
            if metric.kind == "counter":
                # Ray refuses anything else.
                assert value > 0
            self.values.setdefault((metric.name, tuple(labels.values())), []).append(value)

        return record

    def of(self, metric: Metric, *labels: str) -> list[float]:
        """Return the values of a series."""
        return self.values.get((metric.name, labels), [])

    def total(self, metric: Metric, *labels: str) -> float:
        """Return the value of a counter."""
        return sum(self.of(metric, *labels))

    def series(self, metric: Metric) -> set[Labels]:
        """Return the labels of a metric's series."""
        return {labels for name, labels in self.values if name == metric.name}
