"""The memory of the processes of a service, and its growth."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

SETTLE_S = 60.0
"""Seconds of a process that don't count: it fills its caches."""

ROLES = {
    "Engine": "ServeReplica:llm:Engine",
    "Ingress": "ServeReplica:llm:Ingress",
    "EngineCore": "VLLM::EngineCore",
    "HAProxy": "haproxy ",
    "controller": "ServeController",
    "HAProxy's manager": "HAProxyManager",
    "raylet": "/raylet/raylet",
    "GCS": "gcs_server",
    "dashboard": "dashboard/dashboard.py",
}
"""A word of the command line, by what a process does."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the memory of one kind of process went.

    Attributes:
        mib: Median of their memory.
        mib_per_hour: Their common slope; None: none lived long enough.
        spans: Of each process that was seen for long enough: for how many seconds after it had settled, and
            its MiB then, first and last.
    """

    mib: float
    mib_per_hour: float | None
    spans: list[tuple[float, float, float]]


@dataclass
class Memory:
    """Samples of the resident memory of processes, each process with its own line."""

    _lines: dict[tuple[str, int], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def sample(self, processes: Mapping[int, str]) -> None:
        """Read the memory of processes.

        Args:
            processes: Their command lines by their ids.
        """
        now = time.monotonic()
        for pid, command in processes.items():
            for role, word in ROLES.items():
                if word in command:
                    with suppress(psutil.Error):
                        memory = psutil.Process(pid).memory_info()
                        self._lines[role, pid].append((now, (memory.rss - memory.shared) / 2**20))

    def growth(self) -> dict[str, Growth]:
        """Return how each kind of process grew, by least squares with a level of its own for each process."""
        found = {}
        for role in ROLES:
            lines = [settled(line) for (name, _), line in self._lines.items() if name == role]
            lives = [line for line in lines if len(line) > 2]
            if not any(lines):
                continue
            mib = statistics.median(value for line in lines for _, value in line)
            spans = [(line[-1][0] - line[0][0], line[0][1], line[-1][1]) for line in lives]
            found[role] = Growth(mib, slope(lives), spans)
        return found


def settled(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a line without its first minute."""
    return [(at, value) for at, value in line if at - line[0][0] >= SETTLE_S]


def slope(lines: Iterable[list[tuple[float, float]]]) -> float | None:
    """Return the common slope of several lines of (seconds, MiB), in MiB per hour."""
    above = below = 0.0
    for line in lines:
        middle = statistics.mean(at for at, _ in line)
        level = statistics.mean(value for _, value in line)
        above += sum((at - middle) * (value - level) for at, value in line)
        below += sum((at - middle) ** 2 for at, _ in line)
    return above / below * 3600 if below else None
