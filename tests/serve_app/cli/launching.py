"""`saturate serve` in a process of its own, on a stand-in for Ray."""

import http.server
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import psutil

from serve_app.cli.foreground import Cluster, launch
from serve_app.system.command_line import run
from tests.ports import free_port
from tests.progress import STILL_S, wait_until
from tests.serve_app.cli.services import config, write

LIMIT_S = STILL_S

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
"""Starts Python and imports the command once, for all tests."""


def parent(pid: int) -> int:
    """Return the id of the parent of a process; 0 if it has ended."""
    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return 0


def _nothing() -> None:
    """Do nothing; a lambda can't be sent to another process."""


class Command:
    """`saturate serve` in a process of its own.

    Args:
        folder: Its working directory.
        arguments: Its arguments.
        cluster: What runs the service.
        before: Called in its process first.

    Attributes:
        said: Its output so far.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        cluster: Cluster | None = None,
        before: Callable[[], None] = _nothing,
    ) -> None:
        self.said = ""
        self._folder = folder
        self._stderr, stderr = FORKS.Pipe(duplex=False)
        cluster = cluster or StandIn(0)
        self._process = FORKS.Process(target=self._run, args=(folder, arguments, cluster, before, stderr))
        self._process.start()
        stderr.close()

    @staticmethod
    def _run(
        folder: Path,
        arguments: tuple[str, ...],
        cluster: Cluster,
        before: Callable[[], None],
        stderr: Connection,
    ) -> None:
        os.chdir(folder)
        os.dup2(stderr.fileno(), 2)
        stderr.close()
        tempfile.tempdir = str(folder)
        before()
        verbose = "--verbose" in arguments
        log_format = "text" if "--log-format" in arguments else None

        def serve() -> int:
            return launch(
                Path(arguments[0]), verbose=verbose, log_format=log_format, cluster=lambda _: cluster
            )

        run(click.Command("serve", callback=serve), [])

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def _read(self, deadline: float) -> str:
        readable, _, _ = select.select([self._stderr], [], [], max(0, deadline - time.monotonic()))
        assert readable, f"no output and no end: {self.said}"
        piece = os.read(self._stderr.fileno(), 10_000).decode()
        self.said += piece
        return piece

    def hear(self, text: str) -> None:
        """Wait until its output has `text`."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.said:
            assert self._read(deadline), f"it ended: {self.said}"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline):
            pass
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def processes(self, word: str = "") -> list[int]:
        """Return its living processes whose command line has a word: all work in its folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                mine = (process / "cwd").readlink() == self._folder and int(process.name) != self.pid
                if mine and word in (process / "cmdline").read_text().replace("\0", " "):
                    found.append(int(process.name))
        return found

    @staticmethod
    def kill(*pids: int) -> None:
        """End processes with SIGKILL."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End it and the processes that it has left."""
        self._process.kill()
        self._process.join(LIMIT_S)
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class StandIn:
    """A service with processes of the shape of Ray's: in sessions of their own, orphaned, and deaf.

    Attributes:
        port: Where it answers.
        failures: Errors of the start.
        busy: Its requests never finish.
        ends: Its process ends by itself once it has started.
        signals: The launcher gets SIGTERM while it starts.
        logs: Folder of its request logs.
    """

    port: int
    failures: tuple[str, ...] = ()
    busy: bool = False
    ends: bool = False
    signals: bool = False
    logs: Path = Path("logs")

    def start(self) -> Iterator[str]:
        print("the log of Ray", flush=True)
        for error in self.failures:
            raise RuntimeError(error)
        if self.signals:
            os.kill(os.getppid(), signal.SIGTERM)
        subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
        deaf = "trap '' INT HUP TERM; echo; sleep 61 & wait"
        orphan = subprocess.Popen(["setsid", "--fork", "sh", "-c", deaf], stdout=subprocess.PIPE)
        assert orphan.stdout
        orphan.stdout.readline()
        yield "Ray Serve"
        states = ["starting", "starting", "ready"]

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                state = states.pop(0) if len(states) > 1 else states[0]
                ready = state == "ready"
                body = {"status": "ok" if ready else state, "models": {"demo": {"state": state}}}
                self.send_response(200 if ready else 503)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        server = http.server.HTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield "the models"

    def failure(self) -> str:
        if self.ends:
            os._exit(7)
        return ""

    def request_logs(self) -> Path:
        return self.logs.absolute()

    def take_down(self) -> None:
        if self.busy:
            threading.Event().wait()
        Path("stopped").touch()

    def leave(self) -> None:
        Path("left").touch()


class Service(Command):
    """`saturate serve` on the stand-in.

    Args:
        folder: Its working directory.
        arguments: Its options.
        before: Called in its process first.
        cluster: Attributes of the stand-in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        before: Callable[[], None] = _nothing,
        **cluster: Any,
    ) -> None:
        self.port = free_port()
        self.config = write(folder, config(self.port))
        super().__init__(
            folder, str(self.config), *arguments, cluster=StandIn(self.port, **cluster), before=before
        )

    def hear_ready(self) -> None:
        self.hear(f"Ready: http://127.0.0.1:{self.port}")

    @property
    def stopped_in_order(self) -> bool:
        return (self._folder / "stopped").exists()

    @property
    def child(self) -> int:
        """The process that runs Ray."""
        (pid,) = (pid for pid in self.processes() if parent(pid) == self.pid)
        return pid

    def logs(self) -> list[Path]:
        """Return the log files that are there."""
        return list(self._folder.glob("saturate-*.log"))

    def wait_gone(self) -> None:
        """Wait until none of its processes lives and its port is free."""
        wait_until(lambda: not self.processes(), tell=lambda: f"left: {self.processes()}", every_s=0.01)
        # A process that ends has no environment any more, and its sockets for a moment.
        wait_until(self._port_is_free, tell=lambda: f"port {self.port} is in use", every_s=0.01)

    def _port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
        return True
