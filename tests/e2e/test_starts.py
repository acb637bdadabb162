"""The starts of the tests' own services: a second try, and when they begin."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.e2e.service import Service, StartError
from tests.e2e.services import Starting, local

LAUNCHER = """
import pathlib, signal, sys
tries = pathlib.Path("tries")
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
if len(tries.read_text()) <= {failures}:
    sys.exit("Ray did not come up")
print("Ready: here", flush=True)
signal.pause()
"""


def launcher(failures: int) -> type[Service]:
    """Return a service whose first starts fail."""

    class Fragile(Service):
        failed_starts: ClassVar[list[str]] = []
        launcher = (sys.executable, "-c", LAUNCHER.format(failures=failures))

    return Fragile


def test_a_start_that_fails_is_tried_once_more_and_reported(tmp_path: Path) -> None:
    service = launcher(failures=1)(local()[0], tmp_path)
    service.stop()
    assert (tmp_path / "tries").read_text() == ".."
    (message,) = service.failed_starts
    assert str(tmp_path) in message
    assert "Ray did not come up" in message


def test_a_start_that_fails_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="Ray did not come up"):
        launcher(failures=2)(local()[0], tmp_path)
    assert (tmp_path / "tries").read_text() == ".."


def test_on_one_core_a_service_starts_when_a_test_asks_for_it(tmp_path: Path) -> None:
    started: list[Path] = []
    never = Starting(_noting(started), tmp_path, beside=False)
    assert never.stop() is None
    lazy = Starting(_noting(started), tmp_path, beside=False)
    assert started == []
    assert lazy.service() is lazy.service()
    assert started == [tmp_path]
    assert lazy.stop() is lazy.service()


def test_on_more_cores_a_service_starts_beside_the_tests(tmp_path: Path) -> None:
    started: list[Path] = []
    early = Starting(_noting(started), tmp_path, beside=True)
    early.wait()
    assert started == [tmp_path]
    assert early.stop()


def test_a_service_that_can_not_start_is_not_stopped(tmp_path: Path) -> None:
    failing = Starting(launcher_of(failures=2), tmp_path, beside=True)
    with pytest.raises(StartError):
        failing.service()
    assert failing.stop() is None


def launcher_of(failures: int) -> Callable[[Path], Service]:
    return lambda folder: launcher(failures)(local()[0], folder)


def _noting(started: list[Path]) -> Callable[[Path], Service]:
    def start(folder: Path) -> Service:
        started.append(folder)
        return launcher(failures=0)(local()[0], folder)

    return start
