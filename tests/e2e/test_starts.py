"""The starts of the tests' own services: a second try."""

import sys
from pathlib import Path

import pytest

from tests.e2e.service import Service, StartError
from tests.e2e.services import local

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
        launcher = (sys.executable, "-c", LAUNCHER.format(failures=failures))

    return Fragile


def test_a_start_that_fails_is_tried_once_more_and_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"{tmp_path} failed: .*\n.*Ray did not come up"):
        service = launcher(failures=1)(local()[0], tmp_path)
    service.stop()
    assert (tmp_path / "tries").read_text() == ".."


def test_a_start_that_fails_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="Ray did not come up"):
        launcher(failures=2)(local()[0], tmp_path)
    assert (tmp_path / "tries").read_text() == ".."
