"""The image `cpu`, built and run by Docker or Podman where one of them is at hand."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from serve_app.client import Client
from tests import progress
from tests.k8s import image
from tests.k8s.rendering import REPOSITORY

NAME = "saturate-test"
DOCKER_S = 10.0
"""Seconds that `docker stop` gives a container."""


def engine() -> str:
    """Return a container engine that runs here, or nothing."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and not subprocess.run([name, "info"], capture_output=True, check=False).returncode
        ):
            return name
    return ""


ENGINE = engine()

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not ENGINE, reason="neither Docker nor Podman runs here"),
]


def call(*arguments: str) -> str:
    """Run the engine; return what it printed."""
    done = progress.run([ENGINE, *arguments], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def container() -> Iterator[str]:
    """The name of a container with a read-only root and a volume."""
    call("build", "-f", "k8s/Dockerfile", "--target", "cpu", "-t", f"{NAME}:latest", ".")
    options = ["-d", "--name", NAME, "-p", "127.0.0.1::8000", "-v", f"{NAME}:/cache"]
    try:
        call("run", *options, "--read-only", "--tmpfs", "/tmp", "--shm-size", "1g", f"{NAME}:latest")
        yield NAME
    finally:
        subprocess.run([ENGINE, "rm", "--force", NAME], capture_output=True, check=False)
        subprocess.run([ENGINE, "volume", "rm", "--force", NAME], capture_output=True, check=False)


def test_the_container_becomes_healthy_answers_and_stops(container: str) -> None:
    health = image.read("cpu").health
    progress.wait_until(
        lambda: (
            not subprocess.run(
                [ENGINE, "exec", container, *health], capture_output=True, check=False
            ).returncode
        ),
        tell=lambda: call("logs", container),
        every_s=1.0,
    )
    address = call("port", container, "8000").splitlines()[0]
    with Client(f"http://{address}") as client:
        assert client.health().status == "ok"
    began = time.monotonic()
    call("stop", "-t", str(int(DOCKER_S)), container)
    assert time.monotonic() - began < DOCKER_S
    (state,) = json.loads(call("inspect", "--format", "[{{json .State}}]", container))
    assert state["ExitCode"] == 0, call("logs", container)
