"""The command `saturate plan`."""

import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner, Result

from serve_app.cli.main import saturate
from serve_app.simulation.profiles import PROFILES
from serve_app.system.command_line import run
from serve_app.system.tables import duration

USUAL = {"rate": 30, "input": "500", "output": "6:4", "goal": "ttft_p99<0.5", "device": "h100-8b"}


def ask(*flags: str, **options: Any) -> Result:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (USUAL | options).items()]
    return CliRunner().invoke(saturate, ["plan", *given, *flags])


def refusal(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str]:
    """Return the exit code and the error of a command line."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (USUAL | options).items()]
    with pytest.raises(SystemExit) as ended:
        run(saturate, ["plan", *given])
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.fixture(scope="module")
def text() -> str:
    result = ask(price_per_hour=3, seed=4)
    assert result.exit_code == 0, result.output
    assert all(" replica" in line for line in result.stderr.splitlines()), "vLLM writes there, too"
    return result.stdout


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    return dict(json.loads(ask("--json", price_per_hour=3, seed=4).stdout))


def test_the_answer_comes_first_then_the_table_then_the_config(text: str) -> None:
    lines = text.splitlines()
    assert re.match(r"\d+ replicas? of h100-8b with ", lines[0])
    assert "30 requests/s of 500 tokens in and 6:4 out" in lines[1]
    (chosen,) = [line for line in lines if line.startswith("▶")]
    assert chosen.split()[1] == lines[0].split()[0]
    assert f"  num_replicas: {lines[0].split()[0]}" in lines
    assert re.search(r"±: error of 95% from [\d,]+ simulated requests in 4 runs", text)


def test_json_has_the_same(body: dict[str, Any], text: str) -> None:
    assert body["met"]
    assert body["goals"] == ["ttft_p99<0.5"]
    answer = body["answer"]
    assert answer in body["rows"]
    assert answer["holds"]
    assert duration(answer["seconds"]["ttft_p99"], answer["errors"]["ttft_p99"]) in text
    assert answer["errors"]["ttft_p99"] > 0
    assert yaml.safe_load(body["config"])


def test_a_price_adds_its_columns(body: dict[str, Any], text: str) -> None:
    answer = body["answer"]
    assert "price/h" in text
    assert "per M out" in text
    assert answer["cost"]["per_hour"] == 3 * answer["replicas"]
    per_hour = answer["output_tokens_per_s"] * 3600 / 1e6
    assert answer["cost"]["per_million_output_tokens"] == pytest.approx(
        3 * answer["replicas"] / per_hour, rel=1e-3
    )
    assert answer["cost"]["per_million_tokens"] < answer["cost"]["per_million_output_tokens"]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_the_file_of_a_profile_is_a_device(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = PROFILES["h100-8b"].model_dump() | {"name": "mine"}
    write = json.dumps if suffix == "json" else yaml.safe_dump
    (tmp_path / f"gpu.{suffix}").write_text(write(fields))
    monkeypatch.chdir(tmp_path)
    found, named = (
        json.loads(ask("--json", device=device, goal="ttft_p99<0.02").stdout)
        for device in (f"gpu.{suffix}", "h100-8b")
    )
    assert found == named | {"device": "mine"}


def test_no_plan_has_an_exit_code_and_the_best_that_was_seen() -> None:
    result = ask(goal="ttft_p99<0.02")
    assert "a request that is alone in the service has ttft_p99 0.03" in result.stdout
    body = json.loads(ask("--json", goal="ttft_p99<0.02").stdout)
    assert not body["met"]
    assert body["misses"] == ["ttft_p99<0.02"]
    assert body["best"]["ttft_p99"] == pytest.approx(0.0303, abs=0.001)


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process; imports have short ones, too."""
    with suppress(psutil.NoSuchProcess):
        return float(process.cpu_times().user)
    return 0.0


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_nothing_behind(number: signal.Signals) -> None:
    given = [f"--{name}={value}" for name, value in (USUAL | {"rate": 50, "output": "300"}).items()]
    command = [sys.executable, "-c", "from serve_app.cli.main import main; main()", "plan", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        children: list[psutil.Process] = []
        while not any(_cpu_s(each) > 0.5 for each in children):
            assert process.poll() is None
            children = psutil.Process(process.pid).children()
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        assert process.returncode != 0
        assert output == ""
        assert "Traceback" not in errors
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": "ttft<0.5"}, "--goal: 'ttft<0.5': 'ttft' is no metric; take one of ttft"),
        ({"goal": "ttft_p99<x"}, "--goal: 'ttft_p99<x': 'x' is no bound"),
        ({"input": "many"}, "--input: 'many' is no length; write tokens, as in 300, or MEAN:SPREAD"),
        ({"output": "0"}, "--output: '0' is no length"),
        (
            {"device": "tpu"},
            "--device: 'tpu' is neither a device nor a file; the devices are h100-7b, l4-7b",
        ),
        ({"device": "~no user/gpu.yaml"}, "--device: '~no user/gpu.yaml' is neither a device"),
        ({"rate": 0}, "--rate: 0.0 is not in the range"),
        ({"rate": "nan"}, "--rate: 'nan' is not a number in the range"),
        ({"rate": "1e7"}, "--rate: '1e7' is more than 1,000,000"),
        ({"rate": "inf"}, "--rate: inf is not in the range"),
        ({"prefix_share": 2}, "--prefix-share: 2.0 is not in the range"),
        (
            {"input": 131_000, "output": 100},
            "are 131,100, above the 131,072 of h100-8b's max_model_len; lower",
        ),
    ],
)
def test_a_wrong_option_is_one_line(
    options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = refusal(capsys, **options)
    assert code == 2
    assert message in text
    assert text.count("\n") == 1


def test_a_wrong_file_names_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.safe_dump(PROFILES["h100-8b"].model_dump() | {"base_ms": -1.0}))
    code, text = refusal(capsys, device=path)
    assert code == 2
    assert "base_ms: " in text
    assert "Traceback" not in text


def test_a_missing_vllm_is_one_line_with_the_fix() -> None:
    given = [f"--{name}={value}" for name, value in USUAL.items()]
    without = 'import sys; sys.modules["vllm"] = None; from serve_app.cli.main import main; main()'
    ended = subprocess.run([sys.executable, "-c", without, "plan", *given], capture_output=True, text=True)
    assert ended.returncode == 1
    *_, error = ended.stderr.splitlines()
    assert error.startswith("error: vLLM is not installed, and a plan runs its scheduler; install ")
    assert "Traceback" not in ended.stderr


def test_an_exit_code_of_the_shell_is_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = refusal(capsys, goal="ttft_p99<0.001")
    assert code == 3
