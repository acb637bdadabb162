"""Sums over the ledger's rows: tokens, seconds and cost, by tenant, key, model and so on."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from serve_app.ledger.prices import Prices
from serve_app.ledger.rows import Row

BY = ("tenant", "key", "model", "adapter", "tier", "endpoint", "source", "outcome", "day", "replica")
"""Columns by which rows are summed."""

SUMMED = ("prompt_tokens", "cached_tokens", "output_tokens", "cost", "wait_s", "engine_s")

PRICED = ("model", "adapter", "source", "outcome")
"""Columns on which the price depends."""


class Total(NamedTuple):
    """Sums of some rows.

    Attributes:
        calls: Number of rows.
        prompt_tokens: As in a `Row`, and those below.
        cached_tokens: As in a `Row`.
        output_tokens: As in a `Row`.
        cost: As in a `Row`.
        wait_s: As in a `Row`.
        engine_s: As in a `Row`.
        price: Cost in the currency of the prices; None: there are no prices.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    wait_s: float = 0.0
    engine_s: float = 0.0
    price: float | None = None


class Line(NamedTuple):
    """Sums of the rows that have the same values.

    Attributes:
        values: Values of the columns that were asked for.
        total: The sums.
    """

    values: tuple[str, ...]
    total: Total


class Report:
    """Sums over rows.

    Args:
        by: Columns, of `BY`.
        since: Only rows from this time on; None: all.
        until: Only rows before this time; None: all.

    Attributes:
        columns: Columns of tables that it takes.
        wrong: Lines that could not be read.
    """

    columns = {"time", *BY, *SUMMED} - {"day"}

    def __init__(
        self, by: Sequence[str], *, since: datetime | None = None, until: datetime | None = None
    ) -> None:
        self._by = tuple(by)
        self._since = since
        self._until = until
        self._keys = tuple(dict.fromkeys((*by, *PRICED)))
        self._sums: dict[tuple[str, ...], list[float]] = {}
        self.wrong = 0

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, those of the wanted time."""
        for row in rows:
            if (self._since and row.time < self._since) or (self._until and row.time >= self._until):
                continue
            key = tuple(getattr(row, name) for name in self._keys)
            self._add(key, 1, [getattr(row, name) for name in SUMMED])

    def add_table(self, table: Any, day: str) -> None:
        """Add rows of an Arrow table, those of the wanted time.

        Args:
            table: The table.
            day: The day of all rows.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        for bound, compare in ((self._since, pc.greater_equal), (self._until, pc.less)):
            if bound is not None:
                table = table.filter(compare(table["time"], pa.scalar(bound, table["time"].type)))
        names = [name for name in self._keys if name != "day"]
        sums = [(name, "sum") for name in SUMMED]
        grouped = table.group_by(names).aggregate([*sums, ([], "count_all")])
        for found in grouped.to_pylist():
            key = tuple(day if name == "day" else found[name] for name in self._keys)
            self._add(key, found["count_all"], [found[f"{name}_sum"] for name in SUMMED])

    def wants(self, day: str) -> bool:
        """Return whether rows of a day may be of the wanted time."""
        return not (
            (self._since and day < self._since.date().isoformat())
            or (self._until and day > self._until.date().isoformat())
        )

    def lines(self, prices: Prices | None = None) -> list[Line]:
        """Return the sums, those with the most tokens first.

        Args:
            prices: The prices, if there are any.
        """
        found: dict[tuple[str, ...], list[float]] = {}
        for key, sums in self._sums.items():
            named = dict(zip(self._keys, key, strict=True))
            price = 0.0 if prices is None else _price(prices, named, sums)
            values = tuple(named[name] for name in self._by)
            total = found.setdefault(values, [0] * (len(sums) + 1))
            for place, value in enumerate([*sums, price]):
                total[place] += value
        lines = [Line(values, _total(total, priced=prices is not None)) for values, total in found.items()]
        if "day" in self._by:
            return sorted(lines, key=lambda line: line.values)
        return sorted(lines, key=lambda line: (-_size(line.total), line.values))

    def _add(self, key: tuple[str, ...], calls: int, sums: Sequence[float]) -> None:
        total = self._sums.get(key)
        if total is None:
            total = self._sums[key] = [0] * (len(SUMMED) + 1)
        total[0] += calls
        for place, value in enumerate(sums, 1):
            total[place] += value


def _price(prices: Prices, named: Mapping[str, str], sums: Sequence[float]) -> float:
    prompt, cached, output, cost = (int(value) for value in sums[1:5])
    return prices.cost(
        named["model"],
        named["source"],
        named["outcome"],
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        cost=cost,
        adapter=named["adapter"],
    )


def _total(sums: Sequence[float], *, priced: bool) -> Total:
    calls, prompt, cached, output, cost = (int(value) for value in sums[:5])
    return Total(calls, prompt, cached, output, cost, sums[5], sums[6], sums[7] if priced else None)


def _size(total: Total) -> int:
    return total.prompt_tokens + total.output_tokens + total.cost
