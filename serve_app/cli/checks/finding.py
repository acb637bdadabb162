"""Findings of `saturate doctor`, and the case that its checks look at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from serve_app.cli.checks.needs import Needs
from serve_app.cli.machine import MachineFacts

Level = Literal["ok", "warning", "problem"]

LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")
"""From the least to the worst."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        level: "problem": a service can't start, or fails later; "warning": it is slower, or may fail.
        text: One line about what is there.
        fix: One line about what to do; empty if all is well.
    """

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class CheckInput:
    """The machine, config and cluster that the checks look at.

    Attributes:
        machine: The machine.
        needs: The needs of a config; those of none in particular without one.
        address: Ray cluster that the service is to run in; None: it starts a Ray of its own.
    """

    machine: MachineFacts
    needs: Needs
    address: str | None = None


Check = Callable[[CheckInput], Finding | None]
"""Looks at one thing; returns None if it plays no part in the case."""


def ok(text: str) -> Finding:
    """Return the finding that all is well."""
    return Finding("ok", text)


def warning(text: str, fix: str) -> Finding:
    """Return a finding that a service can live with."""
    return Finding("warning", text, fix)


def problem(text: str, fix: str) -> Finding:
    """Return a finding that a service can't live with."""
    return Finding("problem", text, fix)


def combined(findings: Sequence[Finding]) -> Finding | None:
    """Return several findings as one: those of the worst level; None: there are none."""
    level = max((one.level for one in findings), key=LEVELS.index, default=None)
    if level is None:
        return None
    worst = [one for one in findings if one.level == level]
    return Finding(
        level,
        "; ".join(dict.fromkeys(one.text for one in worst)),
        "; ".join(dict.fromkeys(one.fix for one in worst if one.fix)),
    )


def gib(size: float) -> str:
    """Return bytes in GiB, or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
