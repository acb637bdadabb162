"""A PostgreSQL server for tests."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from itertools import count
from pathlib import Path

import pytest

from tests.progress import STILL_S

LIMIT_S = STILL_S
USER = "postgres"
OWNER = USER if any(one.pw_name == USER for one in pwd.getpwall()) else "nobody"
"""The user whose processes a server of root has; Debian's package makes `postgres`, unpacking it doesn't."""


def program(name: str) -> str | None:
    """Return the path of one of PostgreSQL's programs; Debian doesn't put the server's into the path."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((str(folder / name) for folder in folders if (folder / name).exists()), shutil.which(name))


class Server:
    """A server in a folder of its own, which listens on a socket there."""

    def __init__(self) -> None:
        # pytest's folders belong to the user who runs the tests; the server refuses to be root.
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._user = OWNER if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self._folder, self._user)
        self._numbers = count()
        self._data = self._folder / "data"
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-U", USER, "--no-sync")
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = f"-k {self._folder} -c listen_addresses='' -c max_connections=20"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-w", "-o", options, "-l", log, "start")

    def kill(self) -> None:
        """Kill the server with all of its processes, and wait until it is gone."""
        pid = int((self._data / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGQUIT)
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop", check=False)

    def stop(self) -> None:
        """Stop the server, and delete its folder."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def database(self) -> str:
        """Return the URL of a new database."""
        import psycopg

        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def _url(self, name: str) -> str:
        return f"postgresql://{USER}@/{name}?host={self._folder}"

    def _run(self, name: str, *arguments: str, check: bool = True) -> None:
        path = program(name)
        assert path
        subprocess.run(
            [path, *arguments],
            user=self._user,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=check,
        )


def skip_reason() -> str | None:
    """Return why no server can be had here; None: one can."""
    if program("initdb") is None:
        return "PostgreSQL is not installed here (Debian: apt install postgresql)"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed here (pip install -e '.[postgres]')"
    return None


def start() -> Server:
    """Return a server, or skip the test where there is none."""
    if reason := skip_reason():
        pytest.skip(reason)
    return Server()
