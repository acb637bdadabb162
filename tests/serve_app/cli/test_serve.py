"""The command `saturate serve`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import serve_app.cli.launch
from serve_app.cli.serve import serve

ROOT = Path(__file__).parents[3]


def test_the_module_is_a_command(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.cli", "serve", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        f"error: {path}: No such file or directory\n",
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, Any]]]:
    calls: list[tuple[Path, dict[str, Any]]] = []

    def launch(path: Path, **options: Any) -> int:
        calls.append((path, options))
        return 0

    monkeypatch.setattr(serve_app.cli.launch, "launch", launch)
    return calls


def test_a_checkout_serves_the_demo_by_default(launched: list[tuple[Path, dict[str, Any]]]) -> None:
    assert CliRunner().invoke(serve, []).exit_code == 0
    assert launched == [(ROOT / "configs/local.yaml", {"verbose": False, "log_format": None})]


def test_options_reach_the_launcher(launched: list[tuple[Path, dict[str, Any]]]) -> None:
    assert CliRunner().invoke(serve, ["a.yaml", "--verbose", "--log-format", "json"]).exit_code == 0
    assert launched == [(Path("a.yaml"), {"verbose": True, "log_format": "json"})]


def test_an_installed_package_asks_for_a_config(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    monkeypatch.setattr("serve_app.cli.serve.DEMO", tmp_path / "configs/local.yaml")
    result = CliRunner().invoke(serve, [])
    assert result.exit_code == 2
    assert "missing argument 'CONFIG': name a Serve config; the demo, configs/local.yaml," in result.stderr
    assert launched == []
