"""Services that `saturate serve` started on this machine, found by a mark in their environment."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.system.processes import descendants, end_all, start_time

MARK = "SATURATE_RUN"
"""Environment variable with the mark, inherited by all processes of a service, also HAProxy and engines."""

GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service on this machine.

    Attributes:
        port: Port that the service listens on.
        launcher: Process id of its `saturate serve`.
        started: Start time of that process, in clock ticks since boot, since the kernel reuses ids.
        namespace: Namespace of the process id, since another container may have the same ids.
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
        """Whether the launcher runs."""
        return start_time(self.launcher) == self.started

    def processes(self) -> list[int]:
        """Return the ids of the service's live processes, without the launcher."""
        marked = [pid for pid, mark in _marks().items() if mark == self.mark]
        # Some processes of Ray overwrite their environment with their title.
        found = [*dict.fromkeys([*marked, *descendants(*marked)])] if marked else []
        # This process must not end itself, even if a process of the service started it.
        return [pid for pid in found if pid != os.getpid()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher if it runs."""
        if self.alive:
            # The launcher may have ended.
            with suppress(ProcessLookupError):
                os.kill(self.launcher, number)

    def end(self) -> list[int]:
        """End the processes left behind by a dead launcher; return their ids."""
        return end_all(self.processes, GRACE_S)


def this_run(port: int) -> RunningService:
    """Return the service that this process launches."""
    return RunningService(port, os.getpid(), start_time(os.getpid()) or 0, _namespace())


def find_runs() -> list[RunningService]:
    """Return the services of this user and this process namespace with a live process."""
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
    # This process has a mark too if a service started it.
    marks.pop(os.getpid(), None)
    return marks


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
