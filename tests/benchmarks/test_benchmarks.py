"""Each benchmark starts, and a measurement without a service prints a table and writes its file."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from tests.benchmarks import vllm_names
from tests.benchmarks.__main__ import benchmarks
from tests.benchmarks.beside.__main__ import main as beside
from tests.benchmarks.turns.__main__ import main as turns

MODULES = {f"tests.benchmarks.{name}" for name in (*benchmarks(), "vllm_names")} | {"tests.soak"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_benchmark_prints_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.find_spec(name)
    assert spec
    folder = spec.submodule_search_locations
    module = importlib.import_module(f"{name}.__main__" if folder else name)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    assert f"usage: python -m {name} " in capsys.readouterr().out


def test_a_measurement_prints_a_table_and_writes_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "turns.json"
    words = ["--seconds", "5", "--rounds", "2", "--results", str(path)]
    assert turns(words) == 0
    # In five seconds the switches cost more than their target allows.
    assert turns([*words, "--check"]) == 1
    rows = json.loads(path.read_text())["turns"]["rows"]
    assert all(row["low"] <= row["median"] <= row["high"] and row["rounds"] == 2 for row in rows)
    printed = capsys.readouterr().out
    assert all(row["what"] in printed for row in rows)


def test_a_dry_run_lists_the_runs_of_live_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    assert beside(["--dry-run", "--sweep", "--only", "l4-*"]) == 0
    assert "minutes" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.long
def test_the_installed_vllm_has_every_name_that_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_names.main([]) == 0, capsys.readouterr().out
    assert "0 gone or moved" in capsys.readouterr().out
