"""Facts of this machine: packages, programs, limits, space, memory, processes."""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

COMMAND_S = 15.0
"""Seconds that a program has to answer."""

UNLIMITED = 1 << 60
"""Bytes from which on a limit of a control group means that there is none."""


class Space(NamedTuple):
    """Bytes of a file system, or of memory.

    Attributes:
        total: All of them.
        free: Those that may be used.
    """

    total: int
    free: int


class Process(NamedTuple):
    """A process.

    Attributes:
        pid: Its id.
        parent: Id of its parent.
        name: Name of its program, 15 characters at most.
    """

    pid: int
    parent: int
    name: str


class Owned(NamedTuple):
    """Owner and permissions of a file or folder.

    Attributes:
        mine: Whether it belongs to this user; a link never does.
        mode: The permissions.
    """

    mine: bool
    mode: int


class CommandError(Exception):
    """A program failed; the message is the first line of what it said."""


class Machine:
    """This machine.

    Args:
        environment: Environment variables.
        groups: Folder of the control groups.
        processes: Folder of the processes.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        groups: Path = Path("/sys/fs/cgroup"),
        processes: Path = Path("/proc"),
    ) -> None:
        self.environment = environment
        self._groups = groups
        self._processes = processes

    # Packages and programs

    def version(self, package: str) -> str | None:
        """Return the version of an installed package; None: there is none."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def package_text(self, module: str, path: str) -> str | None:
        """Return a text file of an installed package, without importing it; None: there is none.

        Args:
            module: The package's module.
            path: The file, relative to the module's folder.
        """
        folder = self._folder(module)
        return None if folder is None else self.read(folder / path)

    def has_byte_code(self, module: str) -> bool:
        """Return whether the byte code of an installed package is on disk."""
        folder = self._folder(module)
        return (
            folder is not None
            and Path(importlib.util.cache_from_source(str(folder / "__init__.py"))).exists()
        )

    def find_program(self, name: str) -> str | None:
        """Return the path of a program; None: there is none."""
        return shutil.which(name, path=self.environment.get("PATH"))

    def run(self, *command: str) -> str | None:
        """Run a program and return its output; None: there is no such program.

        Raises:
            CommandError: It failed, or gave no answer in time.
        """
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CommandError(f"{command[0]}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise CommandError(f"{command[0]}: no answer within {COMMAND_S:g} s") from None
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines()
            raise CommandError(said[0] if said else f"{command[0]}: exit code {done.returncode}")
        return done.stdout

    # Files

    def read(self, path: Path) -> str | None:
        """Return the text of a file; None: it can't be read."""
        with suppress(OSError, UnicodeDecodeError):
            return path.read_text()
        return None

    def owned(self, path: Path) -> Owned | None:
        """Return the owner and the permissions of a file or folder; None: it isn't there."""
        try:
            found = path.lstat()
            if link := stat.S_ISLNK(found.st_mode):
                found = path.stat()
        except OSError:
            return None
        return Owned(found.st_uid == os.geteuid() and not link, stat.S_IMODE(found.st_mode))

    def space(self, path: Path) -> Space:
        """Return the space of the file system of a folder, which needn't exist yet.

        Raises:
            OSError: It can't be read.
        """
        there = next(one for one in (path, *path.parents) if one.exists())
        total, _, free = shutil.disk_usage(there)
        return Space(total, free)

    def may_write(self, folder: Path) -> bool:
        """Return whether this user may write into a folder, or make it."""
        there = next(one for one in (folder, *folder.parents) if one.exists())
        return os.access(there, os.W_OK | os.X_OK)

    # Limits

    def open_files(self) -> tuple[int, int]:
        """Return the soft and the hard limit of open files; -1: there is none."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def cores(self) -> float:
        """Return the cores that this process may use."""
        return min(self._quotas())

    def memory(self) -> Space:
        """Return the memory that this process may use; a control group may have less than the machine."""
        sizes = {}
        for line in (self.read(self._processes / "meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            sizes[name] = int(value.split()[0]) * 1024
        found = Space(sizes["MemTotal"], sizes["MemAvailable"])
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            limit, used = self._number(limit_file), self._number(used_file)
            if limit is not None and limit < min(UNLIMITED, found.total):
                cached = self._cached(limit_file)
                free = limit - max(0, (used or 0) - cached)
                found = Space(int(limit), int(min(free, found.free)))
        return found

    # Processes

    def processes(self) -> list[Process]:
        """Return the processes of this user."""
        found = []
        for folder in self._processes.glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                if folder.stat().st_uid == os.geteuid():
                    # The name stands in parentheses, and may have spaces and parentheses.
                    text = (folder / "stat").read_text(errors="replace")
                    name, _, rest = text.partition("(")[2].rpartition(")")
                    found.append(Process(int(folder.name), int(rest.split()[1]), name))
        return found

    def _quotas(self) -> list[float]:
        """Return the cores of the machine that this process may use, and those of its control group."""
        found = [float(len(os.sched_getaffinity(0)))]
        quota, _, period = (self.read(self._groups / "cpu.max") or "").partition(" ")
        if quota.isdigit():
            found.append(int(quota) / int(period))
        old_quota, old_period = self._number("cpu/cpu.cfs_quota_us"), self._number("cpu/cpu.cfs_period_us")
        if old_quota and old_period and old_quota > 0:
            found.append(old_quota / old_period)
        return found

    def _cached(self, limit_file: str) -> int:
        """Return the bytes of a control group's use that are pages of files, which the kernel frees."""
        text = self.read((self._groups / limit_file).with_name("memory.stat")) or ""
        pairs = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
        return int(pairs.get("inactive_file") or pairs.get("total_inactive_file") or 0)

    def _number(self, name: str) -> float | None:
        with suppress(ValueError):
            return float((self.read(self._groups / name) or "").strip())
        return None

    @staticmethod
    def _folder(module: str) -> Path | None:
        found = importlib.util.find_spec(module)
        return None if found is None or found.origin is None else Path(found.origin).parent
