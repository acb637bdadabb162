"""Ledgers with rows that a test chooses."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.ledger.parquet import to_parquet
from serve_app.ledger.report import LedgerFiles, ReportLine
from serve_app.ledger.rows import LedgerRow, encode

START = 1_800_000_000.0


def write_row(folder: Path, **fields: Any) -> Path:
    """Add a row of a call that has just ended to a ledger, and return its folder.

    Args:
        folder: Folder of the ledger.
        fields: Fields of the row.
    """
    values: dict[str, Any] = {"call": "a-1", "time": datetime.now(UTC)} | fields
    row = LedgerRow(**values)
    path = folder / f"day={row.day}" / "a.00000.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(encode(row))
    return folder


def at(seconds: float) -> datetime:
    """Return a time some seconds after `START`."""
    return datetime.fromtimestamp(START + seconds, UTC)


def row(number: int, **fields: Any) -> LedgerRow:
    """Return a row of a call with this number, which ended at `START`."""
    return LedgerRow(call=f"a-{number}", **({"time": at(0)} | fields))


def save(folder: Path, day: str, name: str, rows: list[LedgerRow], *, parquet: bool) -> None:
    """Write a segment of a ledger."""
    path = folder / f"day={day}" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"".join(map(encode, rows))
    if parquet:
        content = to_parquet(content)
    path.with_suffix(".parquet" if parquet else ".jsonl").write_bytes(content)


def lines(folder: Path, *by: str, **options: Any) -> list[ReportLine]:
    """Return the lines of a report on a ledger."""
    return LedgerFiles(str(folder)).sums(by, **options)


ROWS = [
    row(1, tenant="a", model="m", prompt_tokens=10, cached_tokens=4, output_tokens=3, engine_s=0.5),
    row(2, tenant="b", model="m", prompt_tokens=100, output_tokens=5, wait_s=0.25),
    row(3, tenant="a", model="n", prompt_tokens=1, output_tokens=1, outcome="cancelled"),
    row(
        4,
        tenant="a",
        model="m",
        time=at(60),
        output_tokens=7,
        source="batch",
    ),
]
