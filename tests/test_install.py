"""`make install`: the build of vLLM that it installs, read from `make --dry-run`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT

GPU = "#!/bin/sh\necho 'GPU 0: NVIDIA L4'\n"
NO_GPU = "#!/bin/sh\necho 'No devices found.'\n"


@pytest.mark.parametrize(
    ("smi", "installed", "words", "build", "anew"),
    [
        (NO_GPU, None, [], "cpu", True),
        (GPU, None, [], "gpu", True),
        (GPU, None, ["BUILD=cpu"], "cpu", True),
        # An environment keeps its build, also the environment of an earlier Makefile, whose file is empty.
        (GPU, "cpu\n", [], "cpu", False),
        (GPU, "", [], "cpu", False),
        (NO_GPU, "gpu\n", [], "gpu", False),
        (GPU, "cpu\n", ["BUILD=gpu"], "gpu", True),
    ],
)
def test_one_build_of_vllm_is_in_the_environment(
    smi: str, installed: str | None, words: list[str], build: str, anew: bool, tmp_path: Path
) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    if installed is not None:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv/installed").write_text(installed)
        # The environment is older than pyproject.toml, so that the packages are installed again.
        os.utime(tmp_path / ".venv/installed", (0, 0))
    (tmp_path / "nvidia-smi").write_text(smi)
    (tmp_path / "nvidia-smi").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("BUILD", "MAKEFLAGS")}
    said = subprocess.run(
        ["make", "--dry-run", "install", *words],
        cwd=tmp_path,
        env={**inherited, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"--editable '.[{build},test]'" in said
    assert ("-m venv --clear .venv" in said) == anew
