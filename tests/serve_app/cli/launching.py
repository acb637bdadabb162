"""`saturate serve` in a process of its own, on a `serve` of the tests in place of Ray's."""

import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import serve_app.cli.dashboard
import serve_app.cli.launch
import serve_app.cli.main
from tests.ports import free_port
from tests.progress import STILL_S, wait_until
from tests.serve_app.cli.services import config, write

LIMIT_S = STILL_S

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
"""Starts Python and imports the command once, for all tests."""


def _nothing() -> None:
    """Do nothing; a lambda can't be sent to another process."""


class Command:
    """`saturate serve` in a process of its own.

    Args:
        folder: Its working directory.
        arguments: Its arguments.
        dashboard: URL that it takes for Ray's dashboard.
        before: Called in its process first.

    Attributes:
        said: Its output so far.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        dashboard: str = "",
        before: Callable[[], None] = _nothing,
    ) -> None:
        self.said = ""
        self._folder = folder
        self._stderr, stderr = FORKS.Pipe(duplex=False)
        dashboard = dashboard or f"http://127.0.0.1:{free_port()}"
        # `serve` is looked for beside Python.
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        self._process = FORKS.Process(target=self._run, args=(folder, arguments, dashboard, before, stderr))
        self._process.start()
        stderr.close()

    @staticmethod
    def _run(
        folder: Path,
        arguments: tuple[str, ...],
        dashboard: str,
        before: Callable[[], None],
        stderr: Connection,
    ) -> None:
        os.chdir(folder)
        os.dup2(stderr.fileno(), 2)
        stderr.close()
        tempfile.tempdir = str(folder)
        sys.executable = str(folder / "python")
        serve_app.cli.dashboard.DASHBOARDS = [dashboard]
        sys.argv = ["saturate", "serve", *arguments]
        before()
        serve_app.cli.main.main()

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


SERVE = """#!{python}
import http.server, json, os, signal, subprocess, sys, yaml
print("serve's own log", flush=True)
for number, error in enumerate({failures}):
    if not os.path.exists(f"failed.{{number}}"):
        open(f"failed.{{number}}", "w").close()
        print(error, flush=True)
        sys.exit(3)
port = yaml.safe_load(open(sys.argv[2]))["http_options"]["port"]
# Processes that outlive `serve run`, in sessions of their own, as Ray's are; one ignores every signal.
subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
deaf = "trap '' INT HUP TERM; echo; sleep 61 & wait"
subprocess.Popen(["setsid", "--fork", "sh", "-c", deaf], stdout=subprocess.PIPE).stdout.readline()
states = ["starting", "starting", "ready"]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        state = states.pop(0) if len(states) > 1 else states[0]
        ready = state == "ready"
        body = {{"status": "ok" if ready else state, "models": {{"demo": {{"state": state}}}}}}
        if self.path == "/dashboard":
            # An application that never ends, as with a request in flight that takes long.
            body = {{"http_options": {{"port": port}}, "applications": {{"llm": {{"status": "RUNNING"}}}}}}
            ready = True
        if self.path == "/api/version":
            body, ready = {{"session_name": "mine"}}, True
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_PUT = do_GET

    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", port), Handler)
# Time for the interrupt, however busy the machine is.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    server.serve_forever()
except KeyboardInterrupt:
    open("stopped", "w")
"""


class Service(Command):
    """`saturate serve` on the tests' `serve`.

    Args:
        folder: Its working directory.
        failures: Errors in the log of the first starts, which end with them.
        busy: The applications never end.
        arguments: Its options.
        before: Called in its process first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        failures: Sequence[str] = (),
        busy: bool = False,
        arguments: Sequence[str] = (),
        before: Callable[[], None] = _nothing,
    ) -> None:
        self.port = free_port()
        serve = folder / "serve"
        serve.write_text(SERVE.format(python=sys.executable, failures=repr(list(failures))))
        serve.chmod(0o755)
        self.config = write(folder, config(self.port))
        dashboard = f"http://127.0.0.1:{self.port}/dashboard" if busy else ""
        super().__init__(folder, str(self.config), *arguments, dashboard=dashboard, before=before)

    def hear_ready(self) -> None:
        self.hear(f"Ready: http://127.0.0.1:{self.port}")

    @property
    def stopped_in_order(self) -> bool:
        return (self._folder / "stopped").exists()

    @property
    def supervisor(self) -> int:
        (pid,) = self.processes("serve_app.cli.supervisor")
        return pid

    @property
    def serve_run(self) -> int:
        (pid,) = set(self.processes("/serve run ")) - {self.supervisor}
        return pid

    def logs(self) -> list[Path]:
        """Return the log files that are there."""
        return list(self._folder.glob("saturate-*.log"))

    def wait_gone(self) -> None:
        """Wait until none of its processes lives and its port is free."""
        wait_until(lambda: not self.processes(), tell=lambda: f"left: {self.processes()}", every_s=0.01)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))
