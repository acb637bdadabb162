"""Findings of `saturate doctor`, and the input of its checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from serve_app.cli.checks.needs import Needs
from serve_app.cli.machine import MachineFacts

Level = Literal["ok", "warning", "problem"]

LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")
"""Levels, in order of severity."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        level: "problem": a service can't start, or fails later; "warning": a service is slower, or may fail.
        text: The finding; of several findings a line each.
        fix: What to do, with a line each; empty if all is well.
    """

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class CheckInput:
    """The input of the checks: machine, config and cluster.

    Attributes:
        machine: The machine.
        needs: The needs of a config; default values without a config.
        address: Ray cluster for the service; None: the service starts its own Ray.
    """

    machine: MachineFacts
    needs: Needs
    address: str | None = None


Check = Callable[[CheckInput], Finding | None]
"""A check; returns None if it doesn't apply."""


def ok(text: str) -> Finding:
    """Return the finding of a passed check."""
    return Finding("ok", text)


def warning(text: str, fix: str) -> Finding:
    """Return a finding that doesn't keep a service from starting."""
    return Finding("warning", text, fix)


def problem(text: str, fix: str) -> Finding:
    """Return a finding that makes a service fail."""
    return Finding("problem", text, fix)


def combined(findings: Sequence[Finding]) -> Finding | None:
    """Combine the findings of the worst level into one finding, with a line each; None without findings."""
    level = max((one.level for one in findings), key=LEVELS.index, default=None)
    if level is None:
        return None
    worst = [one for one in findings if one.level == level]
    between = "; " if level == "ok" else "\n"
    return Finding(
        level,
        between.join(dict.fromkeys(one.text for one in worst)),
        between.join(dict.fromkeys(one.fix for one in worst if one.fix)),
    )


def gib(size: float) -> str:
    """Return a number of bytes as text in GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
