"""Panels of a Grafana dashboard."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, and the name of its series in the legend."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        title: Title.
        unit: Grafana's name of the unit.
        queries: Queries.
        help: Description that Grafana shows beside the title.
        most: Upper end of the axis; None: Grafana chooses.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one title."""

    title: str
    panels: tuple[Panel, ...]
