"""The script that runs before a worker pod ends, with a stand-in for Ray."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.k8s.rendering import K8S
from tests.progress import STILL_S, wait_until

NODE = "0123456789abcdef"


class Machine:
    """A folder like /proc, and a `ray` that writes down how it was called.

    Args:
        folder: Where both are made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.proc = folder / "proc"
        (folder / "bin").mkdir()
        self.process(1, "/bin/bash", "-c", "ray start")
        self.ray(0)

    def process(self, number: int, *arguments: str) -> Path:
        """Add a process."""
        path = self.proc / str(number) / "cmdline"
        path.parent.mkdir(parents=True)
        path.write_text("\0".join(arguments) + "\0")
        return path

    def ray(self, code: int) -> None:
        """Say how `ray` ends."""
        program = self.folder / "bin" / "ray"
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{self.calls}"\nexit {code}\n')
        program.chmod(0o755)

    def drain(self) -> "subprocess.Popen[bytes]":
        """Start the script."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PROC": str(self.proc)}
        return subprocess.Popen(["bash", str(K8S / "drain.sh"), "930"], env=environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("flag", ["--node_id", "--node-id"])
def test_it_drains_the_node_and_waits_for_its_replicas(machine: Machine, flag: str) -> None:
    machine.process(7, "raylet", f"{flag}={NODE}", "--other=1")
    replica = machine.process(8, "ray::ServeReplica:llm:Ingress")
    script = machine.drain()
    wait_until(lambda: machine.calls.exists() and machine.calls.read_text().endswith("930\n"), every_s=0.01)
    calls = machine.calls.read_text().splitlines()
    assert calls[:3] == ["drain-node", "--node-id", NODE]
    assert calls[-2:] == ["--deadline-remaining-seconds", "930"]
    with pytest.raises(subprocess.TimeoutExpired):
        script.wait(0.5)
    replica.unlink()
    assert script.wait(STILL_S) == 0


def test_it_ends_at_once_where_ray_does_not_run(machine: Machine) -> None:
    machine.process(8, "ray::ServeReplica:llm:Ingress")
    assert machine.drain().wait(STILL_S) == 0
    assert not machine.calls.exists()


def test_it_ends_at_once_when_ray_refuses(machine: Machine) -> None:
    machine.process(7, "raylet", f"--node_id={NODE}")
    machine.process(8, "ray::ServeReplica:llm:Ingress")
    machine.ray(1)
    assert machine.drain().wait(STILL_S) == 0


def test_it_ends_at_once_on_a_node_without_replicas(machine: Machine) -> None:
    machine.process(7, "raylet", f"--node_id={NODE}")
    assert machine.drain().wait(STILL_S) == 0
    assert machine.calls.exists()
