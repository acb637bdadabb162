"""Several Ray nodes on this machine, of which one can be lost with all that runs on it."""

import json
import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

from serve_app.cli.dashboard import DASHBOARD_PORTS
from serve_app.settings.environment import HOOK
from tests.ports import free_port, is_free
from tests.progress import run

NODE = "SATURATE_TEST_NODE"

AUTH = {"RAY_AUTH_MODE": "token"}
"""Ray's nodes and its clients share a token that Ray keeps in a file."""


class Nodes:
    """A Ray cluster whose nodes are process groups on the loopback interface.

    Args:
        env: The environment of the nodes.

    Attributes:
        address: Where Ray finds it.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        own = {HOOK.name: HOOK.value, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        self._env = env | AUTH | own
        self.address = f"127.0.0.1:{free_port()}"

    def start_head(self, resources: dict[str, int]) -> None:
        """Start the node that has the cluster's state."""
        port = self.address.rpartition(":")[2]
        # Ray starts no dashboard where another service has the first port.
        dashboard = next(filter(is_free, DASHBOARD_PORTS))
        ports = [f"--port={port}", f"--dashboard-port={dashboard}"]
        self._start("head", ["--head", *ports, "--dashboard-host=127.0.0.1"], resources)

    def add(self, name: str, resources: dict[str, int]) -> None:
        """Add a node."""
        self._start(name, [f"--address={self.address}"], resources)

    def lose(self, name: str) -> int:
        """End all processes of a node at once; return how many there were."""
        count = 0
        while pids := self.pids(name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            count += len(pids)
            time.sleep(0.05)
        return count

    def pids(self, name: str) -> list[int]:
        """Return the processes that run on a node and are not zombies."""
        found = []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if f"{NODE}={self._mark}-{name}".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    def _start(self, name: str, arguments: list[str], resources: dict[str, int]) -> None:
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            *arguments,
            "--node-ip-address=127.0.0.1",
            "--num-cpus=4",
            f"--resources={json.dumps(resources)}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        env = self._env | {NODE: f"{self._mark}-{name}"}
        done = run(command, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
