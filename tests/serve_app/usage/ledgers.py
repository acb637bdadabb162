"""Ledgers with rows that a test chooses."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.usage.rows import Row, encode, utc


def write_row(folder: Path, **fields: Any) -> Path:
    """Add a row of a call that has just ended to a ledger, and return its folder.

    Args:
        folder: Folder of the ledger.
        fields: Fields of the row.
    """
    values: dict[str, Any] = {"call": "a-1", "time": utc(datetime.now(UTC).timestamp())} | fields
    row = Row(**values)
    path = folder / f"day={row.day}" / "a.00000.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(encode(row))
    return folder
