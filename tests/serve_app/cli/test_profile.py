"""The command `saturate profile`, on an engine in virtual time."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import profile as command
from serve_app.cli.main import saturate
from serve_app.simulation.profiles import read_profile
from serve_app.system.command_line import run
from serve_app.tuning.profiling import PARAMETERS
from serve_app.tuning.service import Service
from tests.serve_app.tuning.doubles import VirtualEngine, profile


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VirtualEngine:
    """Put an engine in virtual time in the place of the network."""
    found = VirtualEngine(profile(request_ms=5.0))

    def service(url: str, **options: Any) -> Service:
        return Service(url, clock=lambda: found.now, transport=found, **options)

    monkeypatch.setattr(command, "Service", service)
    return found


def ask(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run(saturate, ["profile", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_the_file_has_the_profile_of_the_engine(
    engine: VirtualEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.yaml"
    assert ask("http://there", "--output", path, "--name", "mine") == 0
    found = read_profile(str(path))
    expected = {name: pytest.approx(getattr(engine.device, name), rel=0.02) for name in PARAMETERS}
    assert {name: getattr(found, name) for name in PARAMETERS} == expected
    assert found.name == "mine"
    assert (found.kv_tokens, found.max_num_seqs) == (60_000, 64)
    shown = capsys.readouterr()
    assert "a step of mine: 10 ms, 0.05 ms per token of a prompt, 0.3 ms per sequence" in shown.out
    assert "a prompt of 2048 tokens" in shown.out
    assert f"written to {path}" in shown.out
    assert "1 of 12: a prompt of 64 tokens" in shown.err
    # A second time it is asked for.
    assert ask("http://there", "--output", path) == 2
    assert "exists; add --overwrite" in capsys.readouterr().err
    assert ask("http://there", "--output", path, "--overwrite") == 0


def test_standard_output_is_the_file_alone(
    engine: VirtualEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("http://there") == 0
    shown = capsys.readouterr()
    path = tmp_path / "gpu.yaml"
    path.write_text(shown.out)
    assert read_profile(str(path)).name == "m"
    assert "a step of m: 10 ms" in shown.err


def test_a_bad_fit_is_told_and_has_an_exit_code(
    engine: VirtualEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Something slows the engine down every now and then.
    engine.noise = (1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    assert ask("http://there", "--output", tmp_path / "gpu.yaml") == 3
    shown = capsys.readouterr()
    assert "warning: the profile describes the device badly: R² 0." in shown.err
    assert (tmp_path / "gpu.yaml").exists()


def test_an_error_is_one_line(engine: VirtualEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("http://there", "--model", "n") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: http://there: it has no model 'n'; there are m"
    assert ask("ftp://there") == 2
    assert "must begin with http://" in capsys.readouterr().err
    assert ask("http://there", "--api-key-env", "NO_SUCH_VARIABLE") == 2
    assert "--api-key-env NO_SUCH_VARIABLE: no such variable" in capsys.readouterr().err


def test_no_service_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 9 has no server.
    assert ask("http://127.0.0.1:9") == 1
    assert "no service is there" in capsys.readouterr().err
