"""The command `saturate profile`, on an engine in virtual time."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import profile as command
from serve_app.cli.main import saturate
from serve_app.simulation.profiles import read_profile
from serve_app.system.command_line import run
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


def test_the_file_has_the_times_that_the_engine_has_learned(
    engine: VirtualEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.yaml"
    assert ask("http://there", "--output", path, "--name", "mine") == 0
    found = read_profile(str(path))
    assert found.step == pytest.approx(engine.device.step, rel=0.02)
    assert (found.name, found.kv_tokens, found.max_num_seqs) == ("mine", 60_000, 64)
    shown = capsys.readouterr()
    assert "a step of mine: 10 ms, 0.05 ms per token of a prompt, 0.3 ms per sequence" in shown.out
    assert "steps, mean error 0." in shown.out
    assert f"written to {path}" in shown.out
    assert "0 requests sent, now 1 at once" in shown.err
    assert 400 <= len(engine.bodies) < 600
    # A second time it is asked for.
    assert ask("http://there", "--output", path) == 2
    assert "exists; add --overwrite" in capsys.readouterr().err
    assert ask("http://there", "--output", path, "--overwrite") == 0
    assert [each.name for each in tmp_path.iterdir()] == ["gpu.yaml"]


def test_an_engine_with_traffic_gets_no_requests(
    engine: VirtualEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("http://there") == 0
    engine.facts, sent = {"running": 3}, len(engine.bodies)
    assert ask("http://there") == 0
    # The one is the first answer, for which a model scaled to zero starts.
    assert len(engine.bodies) == sent + 1


def test_an_engine_that_has_seen_few_steps_is_told(
    engine: VirtualEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.facts = {"running": 3}
    assert ask("http://there") == 1
    assert "has learned from 2 steps, which is too few" in capsys.readouterr().err


def test_standard_output_is_the_file_alone(
    engine: VirtualEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("http://there") == 0
    shown = capsys.readouterr()
    path = tmp_path / "gpu.yaml"
    path.write_text(shown.out)
    assert read_profile(str(path)).name == "m"
    assert "a step of m: 10 ms" in shown.err


def test_a_bad_profile_is_told_and_has_an_exit_code(
    engine: VirtualEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Something slows the engine down every now and then.
    engine.noise = (1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    assert ask("http://there", "--output", tmp_path / "gpu.yaml") == 3
    assert "warning: the profile describes the device badly" in capsys.readouterr().err
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
