"""Facts about this machine: packages, programs, limits, space, memory, processes."""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from serve_app.cli.errors import LaunchError
from serve_app.cli.runs import MARK, RunningService, find_runs
from serve_app.system.gpus import Devices, read_devices
from serve_app.system.limits import Space, available_cores, available_memory
from serve_app.system.processes import Listener, environment, listeners


class Process(NamedTuple):
    """A process.

    Attributes:
        pid: Process id.
        parent: Process id of the parent.
        name: Name of the program.
    """

    pid: int
    parent: int
    name: str


class Owned(NamedTuple):
    """Owner and permissions of a file or folder.

    Attributes:
        mine: Whether the file belongs to this user; False for a link.
        mode: The permission bits.
    """

    mine: bool
    mode: int


class MachineFacts:
    """This machine.

    Args:
        environment: Environment variables.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.environment = environment

    # Packages and programs

    def version(self, package: str) -> str | None:
        """Return the version of a package; None if it is not installed."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def package_text(self, module: str, path: str) -> str | None:
        """Return a text file of a package, without importing the package; None if the file doesn't exist.

        Args:
            module: The package's module.
            path: The file, relative to the module's folder.
        """
        folder = self._folder(module)
        return None if folder is None else self.read(folder / path)

    def has_byte_code(self, module: str) -> bool:
        """Return whether a package's byte code is on disk."""
        folder = self._folder(module)
        return (
            folder is not None
            and Path(importlib.util.cache_from_source(str(folder / "__init__.py"))).exists()
        )

    def find_program(self, name: str) -> str | None:
        """Return the path of a program; None if it doesn't exist."""
        return shutil.which(name, path=self.environment.get("PATH"))

    # Files

    def read(self, path: Path) -> str | None:
        """Return the text of a file; None if it can't be read."""
        with suppress(OSError, UnicodeDecodeError):
            return path.read_text()
        return None

    def owned(self, path: Path) -> Owned | None:
        """Return the owner and the permissions of a file or folder; None if it doesn't exist."""
        try:
            found = path.lstat()
            if link := stat.S_ISLNK(found.st_mode):
                found = path.stat()
        except OSError:
            return None
        return Owned(found.st_uid == os.geteuid() and not link, stat.S_IMODE(found.st_mode))

    def space(self, path: Path) -> Space:
        """Return the space of a folder's file system; the folder needn't exist yet.

        Raises:
            OSError: The space can't be read.
        """
        there = next(one for one in (path, *path.parents) if one.exists())
        total, _, free = shutil.disk_usage(there)
        return Space(total, free)

    def may_write(self, folder: Path) -> bool:
        """Return whether this user may write to a folder, or create it."""
        there = next(one for one in (folder, *folder.parents) if one.exists())
        return os.access(there, os.W_OK | os.X_OK)

    # Limits

    def open_files(self) -> tuple[int, int]:
        """Return the soft and the hard limit of open files; -1: no limit."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def cores(self) -> float:
        """Return the cores that this process may use."""
        return available_cores()

    def memory(self) -> Space:
        """Return the memory that this process may use."""
        return available_memory()

    # Devices and processes

    def devices(self) -> Devices | None:
        """Return the report of NVIDIA's driver; None without a driver.

        Raises:
            DriverError: The driver fails.
        """
        return read_devices()

    def processes(self) -> list[Process]:
        """Return the processes of this user."""
        fields = ["pid", "ppid", "name", "uids"]
        return [
            Process(one.info["pid"], one.info["ppid"], one.info["name"] or "")
            for one in psutil.process_iter(fields)
            if one.info["uids"] and one.info["uids"].effective == os.geteuid()
        ]

    @staticmethod
    def _folder(module: str) -> Path | None:
        found = importlib.util.find_spec(module)
        return None if found is None or found.origin is None else Path(found.origin).parent

    # Services and ports

    def services(self) -> list[RunningService]:
        """Return the services of this machine, also services whose launcher was killed."""
        return find_runs()

    def mark_of(self, pid: int) -> str:
        """Return the mark of the service that started a process; empty without a service."""
        return environment(pid).get(MARK, "")

    def port_refusal(self, host: str, port: int) -> str:
        """Return the reason why a port can't be used; empty if it can."""
        # This imports Ray.
        from serve_app.cli.preflight import check_port

        try:
            check_port(host, port, [])
        except LaunchError as error:
            return error.message
        return ""

    def listeners(self, port: int) -> list[Listener]:
        """Return the processes of this user that listen on a port."""
        return listeners(port)
