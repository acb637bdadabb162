"""Services that `saturate serve` has started on this machine, found by a mark in their environment."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.system.processes import descendants, end_all, start_time

MARK = "SATURATE_RUN"
"""Environment variable that all processes of a service inherit, down to HAProxy and the engines."""

GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class RunningService:
    """One service.

    Attributes:
        port: Port that it listens on.
        launcher: Process id of its `saturate serve`.
        started: Start time of that process, in clock ticks since boot; the kernel reuses ids.
        namespace: Namespace of the process id: another container's process 1 is another process.
    """

    port: int
    launcher: int
    started: int
    namespace: int

    @property
    def mark(self) -> str:
        """The value of `MARK`."""
        return f"{self.port}.{self.launcher}.{self.started}.{self.namespace}"

    @property
    def alive(self) -> bool:
        """True if its launcher runs."""
        return start_time(self.launcher) == self.started

    def processes(self) -> list[int]:
        """Return the ids of its living processes, without the launcher."""
        marked = [pid for pid, mark in _marks().items() if mark == self.mark]
        # Some processes of Ray have written their title over their environment.
        found = [*dict.fromkeys([*marked, *descendants(*marked)])] if marked else []
        # A process of the service may have started this one, which mustn't end itself.
        return [pid for pid in found if pid != os.getpid()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its launcher, if it runs."""
        if self.alive:
            # It may end at this moment.
            with suppress(ProcessLookupError):
                os.kill(self.launcher, number)

    def end(self) -> list[int]:
        """End its processes, of a launcher that is dead; return their ids."""
        return end_all(self.processes, GRACE_S)


def this_run(port: int) -> RunningService:
    """Return the service that this process launches."""
    return RunningService(port, os.getpid(), start_time(os.getpid()) or 0, _namespace())


def find_runs() -> list[RunningService]:
    """Return the services of this user and this process namespace that have a living process."""
    runs = []
    for mark in set(_marks().values()):
        try:
            run = RunningService(*map(int, mark.split(".")))
        except (TypeError, ValueError):
            continue
        if run.namespace == _namespace():
            runs.append(run)
    return sorted(runs, key=lambda run: run.port)


def _marks() -> dict[int, str]:
    """Return the mark of each marked process of this user."""
    marks = {}
    for process in psutil.process_iter(["uids", "environ"]):
        found: dict[str, str] = process.info["environ"] or {}
        uids = process.info["uids"]
        if uids and uids.effective == os.geteuid() and (mark := found.get(MARK)):
            marks[process.pid] = mark
    # This process has a mark of its own if a service has started it.
    marks.pop(os.getpid(), None)
    return marks


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
