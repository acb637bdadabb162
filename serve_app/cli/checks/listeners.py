"""Processes that listen on a TCP port of this machine."""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LISTEN = "0A"
"""State of a listening socket in the kernel's tables."""


class Listener(NamedTuple):
    """A process that listens.

    Attributes:
        pid: Its id.
        name: Name of its program.
    """

    pid: int
    name: str


def listeners(port: int, processes: Path = Path("/proc")) -> list[Listener]:
    """Return the processes that listen on a port, as far as this user may see them.

    Args:
        port: The port.
        processes: Folder of the processes.
    """
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, processes)}
    found = []
    for folder in processes.glob("[0-9]*") if sockets else ():
        # Processes of others can't be looked into, and some end meanwhile.
        with suppress(OSError):
            if any(_target(file) in sockets for file in (folder / "fd").iterdir()):
                found.append(
                    Listener(int(folder.name), (folder / "comm").read_text(errors="replace").strip())
                )
    return sorted(found)


def _inodes(port: int, processes: Path) -> set[str]:
    """Return the inode numbers of the sockets that listen on a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (processes / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                local, state, inode = fields[1], fields[3], fields[9]
                if state == LISTEN and int(local.rpartition(":")[2], 16) == port:
                    found.add(inode)
    return found


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""
