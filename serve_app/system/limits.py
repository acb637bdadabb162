"""Cores and memory that this process may use; a control group may allow less than the machine has."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

GROUPS = Path("/sys/fs/cgroup")
"""Folder of the control groups."""

UNLIMITED = 1 << 60
"""A control group's memory limit of this many bytes or more means no limit."""


class Space(NamedTuple):
    """Bytes of a file system, or of memory.

    Attributes:
        total: All bytes.
        free: Usable bytes.
    """

    total: int
    free: int


def available_cores(groups: Path = GROUPS) -> float:
    """Return the cores that this process may use.

    Args:
        groups: Folder of the control groups.
    """
    found = [float(len(os.sched_getaffinity(0)))]
    quota, _, period = _text(groups / "cpu.max").partition(" ")
    if quota.isdigit():
        found.append(int(quota) / int(period))
    old_quota, old_period = (_number(groups / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if old_quota and old_period and old_quota > 0:
        found.append(old_quota / old_period)
    return min(found)


def available_memory(groups: Path = GROUPS, machine: Space | None = None) -> Space:
    """Return the memory that this process may use.

    Args:
        groups: Folder of the control groups.
        machine: The memory of the machine; None: ask the kernel.
    """
    if machine is None:
        told = psutil.virtual_memory()
        machine = Space(told.total, told.available)
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(groups / limit_file), _number(groups / used_file)
        if limit is not None and limit < min(UNLIMITED, machine.total):
            free = limit - max(0, (used or 0) - _cached(groups / limit_file))
            machine = Space(int(limit), max(0, int(min(free, machine.free))))
    return machine


def _cached(limit_file: Path) -> int:
    """Return the bytes of cached file pages in a control group's usage, which the kernel can free."""
    pairs = [line.split() for line in _text(limit_file.with_name("memory.stat")).splitlines()]
    values = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return int(values.get("inactive_file") or values.get("total_inactive_file") or 0)


def _number(path: Path) -> float | None:
    with suppress(ValueError):
        return float(_text(path).strip())
    return None


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""
