"""The command `saturate plan`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from serve_app.cli.main import saturate
from serve_app.simulation.profiles import PROFILES
from serve_app.system.command_line import run

USUAL = {"rate": 30, "input": "500", "output": "60:40", "goal": "ttft_p99<0.5", "device": "h100-8b"}


def ask(*flags: str, **options: Any) -> Result:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (USUAL | options).items()]
    return CliRunner().invoke(saturate, ["plan", *given, *flags])


def refusal(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str]:
    """Return the exit code and the error of a command line."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (USUAL | options).items()]
    with pytest.raises(SystemExit) as ended:
        run(saturate, ["plan", *given])
    return int(ended.value.code or 0), capsys.readouterr().err


def test_the_answer_comes_first_then_the_table_then_the_config() -> None:
    result = ask()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.match(r"\d+ replicas? of h100-8b with ", lines[0])
    assert "30 requests/s of 500 tokens in and 60:40 out" in lines[1]
    (chosen,) = [line for line in lines if line.startswith("▶")]
    assert chosen.split()[1] == lines[0].split()[0]
    assert f"  num_replicas: {lines[0].split()[0]}" in lines
    assert re.search(r"±: error of 95% from [\d,]+ simulated requests per row", result.stdout)
    assert "price/h" not in result.stdout


def test_json_has_the_same() -> None:
    body = json.loads(ask("--json", price_per_hour=3).stdout)
    assert body["met"]
    assert body["goals"] == ["ttft_p99<0.5"]
    answer = body["answer"]
    assert answer in body["rows"]
    assert answer["holds"]
    assert answer["seconds"]["ttft_p99"] < 0.5
    assert answer["errors"]["ttft_p99"] > 0
    assert answer["cost"]["per_hour"] == 3 * answer["replicas"]
    per_hour = answer["output_tokens_per_s"] * 3600 / 1e6
    assert answer["cost"]["per_million_output_tokens"] == pytest.approx(
        3 * answer["replicas"] / per_hour, rel=1e-3
    )
    assert answer["cost"]["per_million_tokens"] < answer["cost"]["per_million_output_tokens"]
    assert yaml.safe_load(body["config"])


def test_a_price_adds_its_columns() -> None:
    text = ask(price_per_hour=2.5).stdout
    assert "price/h" in text
    assert "per M out" in text


def test_a_seed_has_one_output() -> None:
    assert ask(seed=4).stdout == ask(seed=4).stdout
    assert ask(seed=4).stdout != ask(seed=5).stdout


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_the_file_of_a_profile_is_a_device(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = PROFILES["h100-8b"].model_dump() | {"name": "mine"}
    write = json.dumps if suffix == "json" else yaml.safe_dump
    (tmp_path / f"gpu.{suffix}").write_text(write(fields))
    monkeypatch.chdir(tmp_path)
    named = ask(device=f"gpu.{suffix}").stdout
    assert named.startswith(ask().stdout.split(" of ")[0])
    assert " of mine with " in named


def test_no_plan_has_an_exit_code_and_the_best_that_was_seen() -> None:
    result = ask(goal="ttft_p99<0.02")
    assert "a request that is alone in the service has ttft_p99 0.03" in result.stdout
    body = json.loads(ask("--json", goal="ttft_p99<0.02").stdout)
    assert not body["met"]
    assert body["misses"] == ["ttft_p99<0.02"]
    assert body["best"]["ttft_p99"] == pytest.approx(0.0303, abs=0.001)


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


def test_an_exit_code_of_the_shell_is_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = refusal(capsys, goal="ttft_p99<0.001")
    assert code == 3
