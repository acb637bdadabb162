"""The image `cpu` as `docker run` starts it, on this machine without Docker.

SATURATE_LAYERS names a folder in which `python -m tests.k8s.image cpu FOLDER` has built the image; without it
the tests build one.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s import container, image, machine
from tests.k8s.container import Container
from tests.k8s.image import Image
from tests.k8s.machine import Machine

LAYERS = os.environ.get("SATURATE_LAYERS", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount layers"),
    pytest.mark.skipif(bool(machine.missing()), reason=f"containers need namespaces: {machine.missing()}"),
    pytest.mark.skipif(
        not LAYERS and bool(image.missing()), reason=f"the image can't be built here: {image.missing()}"
    ),
]

DOCKER_S = 10.0
"""Seconds that `docker stop` gives a container."""

CACHES = {".cache", ".local", ".ray", ".config", ".triton"}
"""Folders that programs make in their home."""


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image for CPUs."""
    if LAYERS:
        return Image.read(Path(LAYERS))
    return image.build("cpu", tmp_path_factory.mktemp("layers"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Machine]:
    """Where containers run."""
    found = Machine(tmp_path)
    try:
        yield found
    finally:
        found.stop()


def check_answer(running: Container, port: int = 8000) -> None:
    """Ask for a sum from outside of the container."""
    status, text = running.ask("/generate", {"prompts": ["What is 47+28?"], "task_id": "container"}, port)
    assert status == 200, text
    assert json.loads(text)["results"] == ["75"]


def owners(folder: Path) -> set[int]:
    """Return the owners of all files below a folder."""
    return {path.lstat().st_uid for path in folder.rglob("*")}


def test_one_line_starts_the_demo_and_docker_stop_ends_it(place: Machine, cpu: Image, tmp_path: Path) -> None:
    running = container.start(place, cpu, tmp_path / "demo")
    assert not running.healthy()
    took = running.wait_healthy()
    check_answer(running)
    assert "asks for no API key" in running.log()
    container.leave_an_orphan(running)
    ours = running.processes()
    assert len(ours) > 5
    code, seconds = running.stop(DOCKER_S)
    print(f"healthy after {took:.1f} s, stopped in {seconds:.1f} s")
    assert code == 0, running.log()
    assert seconds < DOCKER_S
    assert [process for process in ours if process.is_running()] == []
    # Without a read-only root, /tmp is a part of it.
    assert running.written is not None
    assert {path.name for path in running.written.iterdir()} <= {"tmp"}
    assert {path.name for path in running.volume.iterdir()} <= CACHES
    assert owners(running.volume) == {1000}


def test_with_a_read_only_root_the_health_check_finds_the_port_in_use(
    place: Machine, cpu: Image, tmp_path: Path
) -> None:
    command = ["serve", "demo", "--port", "9000"]
    running = container.start(place, cpu, tmp_path / "sealed", command, read_only=True, shm="2g")
    done = running.execute(["touch", "/models/file"])
    assert "Read-only file system" in done.stderr
    running.wait_healthy()
    check_answer(running, 9000)
    code, seconds = running.stop(DOCKER_S)
    assert code == 0, running.log()
    assert seconds < DOCKER_S
    assert (running.volume / ".local/share/saturate").is_dir()
    assert owners(running.volume) == {1000}


def test_a_stop_during_the_start_ends_the_container_at_once(
    place: Machine, cpu: Image, tmp_path: Path
) -> None:
    running = container.start(place, cpu, tmp_path / "early")
    _, seconds = running.stop(DOCKER_S)
    assert seconds < DOCKER_S


def test_another_command_of_saturate_runs(place: Machine, cpu: Image, tmp_path: Path) -> None:
    running = container.start(place, cpu, tmp_path / "other", ["--version"])
    running.running.process.wait(DOCKER_S)
    assert running.running.process.returncode == 0
    assert "saturate" in running.log()
