"""Sums over the files of a ledger, by queries in SQL for DuckDB."""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from serve_app.ledger.prices import FILE, Prices, unpack
from serve_app.ledger.remote import NEEDS as NEEDS_REMOTE
from serve_app.ledger.rows import LedgerRow
from serve_app.settings.fields import below_home
from serve_app.system.distribution import extra

BY = ("tenant", "key", "model", "adapter", "tier", "endpoint", "source", "outcome", "day", "replica")
"""Columns by which rows are summed."""

SUMMED = ("prompt_tokens", "cached_tokens", "output_tokens", "cost", "wait_s", "engine_s")

PRICED = ("model", "adapter", "source", "outcome")
"""Columns on which the price depends."""

NEEDS = f"needs DuckDB: {extra('usage')}"

MEMORY = "400MB"

THREADS = 2
"""Threads of a query, which runs beside a service."""

TRIES = 5
"""Tries of a query: the next try finds a segment that has become Parquet meanwhile."""

KINDS = {
    "time": "TIMESTAMPTZ",
    "resumed": "BOOLEAN",
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens", "cost"), "BIGINT"),
    **dict.fromkeys(("wait_s", "engine_s"), "DOUBLE"),
}
"""Types of columns; all other columns are VARCHAR."""

COLUMNS = {name: KINDS.get(name, "VARCHAR") for name in LedgerRow.__struct_fields__}


class LedgerError(Exception):
    """The ledger can't be read; the message says why."""


class Total(NamedTuple):
    """Sums of some rows.

    Attributes:
        calls: Number of rows.
        prompt_tokens: As in a `LedgerRow`.
        cached_tokens: As in a `LedgerRow`.
        output_tokens: As in a `LedgerRow`.
        cost: As in a `LedgerRow`.
        wait_s: As in a `LedgerRow`.
        engine_s: As in a `LedgerRow`.
        price: Cost in the currency of the prices; None: there are no prices.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    wait_s: float = 0.0
    engine_s: float = 0.0
    price: Decimal | None = None

    def plus(self, other: "Total") -> "Total":
        """Return the sums of both."""
        price = self.price
        if other.price is not None:
            price = other.price if price is None else price + other.price
        return Total(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.cost + other.cost,
            self.wait_s + other.wait_s,
            self.engine_s + other.engine_s,
            price,
        )


class ReportLine(NamedTuple):
    """Sums of the rows that have the same values.

    Attributes:
        values: Values of the requested columns.
        total: The sums.
    """

    values: tuple[str, ...]
    total: Total


class LedgerFiles:
    """The files of a ledger, for queries.

    Args:
        place: A folder or a URL.

    Attributes:
        wrong: Lines that aren't rows, in the last query. A kill may leave a part of a last line.

    Raises:
        LedgerError: There is no such folder, the URL is invalid, or a package is missing.
    """

    def __init__(self, place: str) -> None:
        self.wrong = 0
        self._place = place
        try:
            import duckdb
        except ImportError:
            raise LedgerError(f"{place}: a report {NEEDS}") from None
        self._duckdb: Any = duckdb
        try:
            from fsspec.core import url_to_fs

            url = place if "://" in place else str(below_home(place))
            self._files, self._root = url_to_fs(url)
        except ImportError as error:
            raise LedgerError(f"{place}: {NEEDS_REMOTE} ({error})") from None
        except ValueError as error:
            raise LedgerError(f"{place}: {error}") from None
        protocol = self._files.protocol
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        # DuckDB's own file system is faster for local files.
        self._scheme = "" if scheme in ("file", "local") else scheme
        if "://" not in place and not below_home(place).is_dir():
            raise LedgerError(f"{place}: there is no such folder")

    @cached_property
    def prices(self) -> Prices | None:
        """The prices that the service has written beside its rows; None: there are no prices.

        Raises:
            LedgerError: The file of prices is damaged.
        """
        try:
            return unpack(self._files.cat_file(f"{self._root}/{FILE}"))
        except FileNotFoundError:
            return None
        except ValueError:
            text = "has no valid prices; remove it, or give a config with prices (--config)"
            raise LedgerError(f"{self._root}/{FILE} {text}") from None

    def sums(
        self,
        by: Sequence[str],
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        prices: Prices | None = None,
    ) -> list[ReportLine]:
        """Return sums over rows: in order of the values if `by` has the day, else by tokens, most first.

        Args:
            by: Columns, of `BY`.
            since: Only calls that ended at this time or later; None: all.
            until: Only calls that ended before this time; None: all.
            prices: The prices; None: no prices.

        Raises:
            LedgerError: A file is not the ledger's.
            OSError: A file can't be read.
        """
        keys = tuple(dict.fromkeys((*by, *PRICED))) if prices else tuple(dict.fromkeys(by))
        sums = ", ".join(f"sum({name}::{COLUMNS[name]})" for name in SUMMED)
        names = ", ".join(keys)
        found = self._ask(
            f"SELECT wrong, {names}, count(*), {sums} FROM lines GROUP BY wrong, {names}", since, until
        )
        self.wrong = 0
        totals: dict[tuple[str, ...], Total] = {}
        for wrong, *row in found:
            if wrong:
                self.wrong += row[len(keys)]
                continue
            named = dict(zip(keys, row, strict=False))
            numbers = Total(*row[len(keys) :])
            if prices is not None:
                numbers = numbers._replace(price=_price(prices, named, numbers))
            values = tuple(named[name] for name in by)
            totals[values] = totals.get(values, Total()).plus(numbers)
        lines = [ReportLine(values, total) for values, total in totals.items()]
        if "day" in by:
            return sorted(lines)
        return sorted(lines, key=lambda line: (-_size(line.total), line.values))

    def _ask(self, question: str, since: datetime | None, until: datetime | None) -> list[tuple[Any, ...]]:
        """Return the rows of a query of `lines`; see `_define`."""
        error: Exception | None = None
        for _ in range(TRIES):
            segments = self._segments(since, until)
            with self._duckdb.connect(config={"threads": THREADS, "memory_limit": MEMORY}) as db:
                if self._scheme:
                    db.register_filesystem(self._files)
                try:
                    self._define(db, segments, since, until)
                    found: list[tuple[Any, ...]] = db.execute(question).fetchall()
                except (self._duckdb.IOException, FileNotFoundError) as failure:
                    # A segment has become Parquet, or was removed as too old.
                    error = failure
                except self._duckdb.Error as failure:
                    raise LedgerError(f"{self._place}: a file is not the ledger's: {failure}") from None
                else:
                    return found
        raise LedgerError(f"{self._place}: {error}") from None

    def _segments(self, since: datetime | None, until: datetime | None) -> list[PurePosixPath]:
        """Return the files with rows between two times, by the days of their folders."""
        # A cached listing would hide files from other processes.
        self._files.invalidate_cache()
        first = None if since is None else f"day={since.date()}"
        last = None if until is None else f"day={until.date()}"
        found: list[PurePosixPath] = []
        for folder in map(PurePosixPath, self._files.glob(f"{self._root}/day=*")):
            if (first is None or folder.name >= first) and (last is None or folder.name <= last):
                found += map(PurePosixPath, self._files.ls(str(folder), detail=False))
        packed = {path for path in found if path.suffix == ".parquet"}
        lines = [path for path in found if path.suffix == ".jsonl"]
        # A crash may have left the JSON lines of a segment that is Parquet already.
        return sorted(packed) + sorted(path for path in lines if path.with_suffix(".parquet") not in packed)

    def _define(
        self, db: Any, segments: list[PurePosixPath], since: datetime | None, until: datetime | None
    ) -> None:
        """Define `lines`: the rows between two times, and all lines that aren't rows, which are `wrong`."""
        bounds = [f"time >= '{since.isoformat()}'::TIMESTAMPTZ"] if since else []
        bounds += [f"time < '{until.isoformat()}'::TIMESTAMPTZ"] if until else []
        within = " AND ".join(bounds) or "true"
        parts = []
        for suffix, wrong, reader, options in (
            (".parquet", "false", "read_parquet", ", union_by_name = true"),
            (
                ".jsonl",
                "call IS NULL",
                "read_json",
                f", format = 'newline_delimited', ignore_errors = true, columns = {COLUMNS}",
            ),
        ):
            paths = [self._url(path) for path in segments if path.suffix == suffix]
            if paths:
                columns = ", ".join(COLUMNS)
                parts.append(
                    f"SELECT {columns}, day, {wrong} AS wrong FROM {reader}({paths}{options}, "
                    f"hive_partitioning = true, hive_types = {{'day': VARCHAR}}) WHERE {wrong} OR {within}"
                )
        if not parts:
            empty = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
            parts.append(f"SELECT {empty}, '' AS day, false AS wrong WHERE false")
        db.execute(f"CREATE VIEW lines AS {' UNION ALL '.join(parts)}")

    def _url(self, path: PurePosixPath) -> str:
        return f"{self._scheme}://{path}" if self._scheme else str(path)


def _price(prices: Prices, named: dict[str, str], total: Total) -> Decimal:
    return prices.cost(
        named["model"],
        named["source"],
        named["outcome"],
        prompt_tokens=total.prompt_tokens,
        cached_tokens=total.cached_tokens,
        output_tokens=total.output_tokens,
        cost=total.cost,
        adapter=named["adapter"],
    )


def _size(total: Total) -> int:
    return total.prompt_tokens + total.output_tokens + total.cost
