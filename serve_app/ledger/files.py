"""Places of the ledger's files.

    day=2026-11-23/NAME.00001.jsonl     rows of the calls that ended on a day: a segment, which may grow
    day=2026-11-23/NAME.00000.parquet   the same of one that is closed, in format parquet
    day=2026-11-23/NAME.lost.jsonl      calls that ran in NAME when its process died
    open/NAME.jsonl                     state of the calls that run in NAME, replaced twice a second
    open/NAME.lock                      locked while the process of NAME lives
    prices.json                         a copy of the config's prices

NAME is unique for each process that has written.
"""

import re
from pathlib import Path, PurePosixPath

OPEN = "open"
LOST = "lost"
PRICES = "prices.json"
JSONL, PARQUET, LOCK = ".jsonl", ".parquet", ".lock"


def unique_name(replica: str, nonce: str) -> str:
    """Return the name of a process.

    Args:
        replica: Its replica.
        nonce: Hex digits that no other process has.
    """
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', replica).strip('-') or 'engine'}-{nonce}"


def segment_path(folder: Path, day: str, name: str, number: int) -> Path:
    """Return the path of a segment."""
    return folder / f"day={day}" / f"{name}.{number:05d}{JSONL}"


def lost_path(folder: Path, day: str, name: str) -> Path:
    """Return the path of the calls that were lost with a process."""
    return folder / f"day={day}" / f"{name}.{LOST}{JSONL}"


def open_path(folder: Path, name: str) -> Path:
    """Return the path of the running calls of a process."""
    return folder / OPEN / f"{name}{JSONL}"


def lock_path(folder: Path, name: str) -> Path:
    """Return the path of the lock of a process."""
    return folder / OPEN / f"{name}{LOCK}"


def writer_of(path: PurePosixPath | Path) -> str:
    """Return the name of the process whose file this is."""
    return path.name.partition(".")[0]


def day_of(path: PurePosixPath | Path) -> str:
    """Return the day of a segment."""
    return path.parent.name.removeprefix("day=")
