"""Sums over the ledger's files: tokens, seconds and cost, by tenant, key, model and so on."""

import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from serve_app.usage.files import JSONL, OPEN, PARQUET, day_of, lock_path, writer_of
from serve_app.usage.parquet import NEEDS
from serve_app.usage.prices import Prices
from serve_app.usage.rows import Row, as_lost, decode

BY = ("tenant", "key", "model", "adapter", "tier", "endpoint", "source", "outcome", "day", "replica")
"""Columns by which rows are summed."""

SUMMED = ("prompt_tokens", "cached_tokens", "output_tokens", "cost", "wait_s", "engine_s")

PRICED = ("model", "adapter", "source", "outcome")
"""Columns on which the price depends."""


class ReportError(Exception):
    """The ledger can't be read; the message says why."""


class Files(Protocol):
    """The part of a `Disk` that reads."""

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""

    def files(self, folder: Path, pattern: str) -> list[Path]:
        """Return the files below a folder that match a pattern, in order."""

    def locked(self, path: Path) -> bool:
        """Return whether a process has the lock of a file."""


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
        wrong: Lines that could not be read.
    """

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


def read(files: Files, folder: Path, report: Report) -> Report:
    """Add the rows of a ledger to a report, each call once.

    Args:
        files: The file system.
        folder: Folder of the ledger.
        report: The report.

    Raises:
        ReportError: A package is missing, or a file isn't the ledger's.
        OSError: A file can't be read.
    """
    # Before the segments: a call that ends meanwhile is then found in both, and not in neither.
    states = _states(files, folder)
    paths = files.files(folder, "day=*/*")
    packed = {path for path in paths if path.suffix == PARQUET}
    for path in paths:
        if path.suffix not in (JSONL, PARQUET) or path.with_suffix(PARQUET) in packed - {path}:
            continue
        # The rows of a process that has left states tell which of these are settled.
        own = states.get(writer_of(path), {})
        if not own and not report.wants(day_of(path)):
            continue
        _add_segment(files, path, own, report)
    for own in states.values():
        report.add(own.values())
    return report


def _states(files: Files, folder: Path) -> dict[str, dict[str, Row]]:
    """Return the last states of running calls, by process and call."""
    found = {}
    for path in files.files(folder / OPEN, f"*{JSONL}"):
        name = writer_of(path)
        try:
            rows, _ = decode(files.read(path))
        except FileNotFoundError:
            continue
        if not files.locked(lock_path(folder, name)):
            rows = list(map(as_lost, rows))
        found[name] = {row.call: row for row in rows}
    return found


def _add_segment(files: Files, path: Path, states: dict[str, Row], report: Report) -> None:
    try:
        content = files.read(path)
    except FileNotFoundError:
        # It has been compacted meanwhile, or is too old.
        path = path.with_suffix(PARQUET)
        try:
            content = files.read(path)
        except FileNotFoundError:
            return
    if path.suffix == JSONL:
        rows, wrong = decode(content)
        report.wrong += wrong
        for row in rows:
            states.pop(row.call, None)
        report.add(rows)
        return
    table = _table(content, path)
    if states:
        for call in table["call"].to_pylist():
            states.pop(call, None)
    report.add_table(table, day_of(path))


def _table(content: bytes, path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ReportError(f"{path}: {NEEDS}") from None
    names = {"call", "time", *BY, *SUMMED} - {"day"}
    try:
        return pq.read_table(io.BytesIO(content), columns=sorted(names))
    except pa.ArrowException as error:
        raise ReportError(f"{path}: it is no Parquet file of the ledger: {error}") from None


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
