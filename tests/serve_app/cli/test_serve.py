"""The command `saturate serve`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import serve_app.cli.foreground
from serve_app.cli.main import saturate
from tests import progress
from tests.serve_app.cli.services import config, write
from tests.serve_app.models.doubles import L4, QWEN_7B, QWEN_7B_BYTES, FakeHub, machine, write_model

ROOT = Path(__file__).parents[3]


def test_the_module_is_a_command(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    done = progress.run([sys.executable, "-m", "serve_app.cli", "serve", str(path)])
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"error: {path}: No such file or directory\n",
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, Any]]]:
    calls: list[tuple[Path, dict[str, Any]]] = []

    def launch(path: Path, **options: Any) -> int:
        calls.append((path, options))
        return 0

    monkeypatch.setattr(serve_app.cli.foreground, "launch", launch)
    return calls


def test_options_reach_the_launcher(launched: list[tuple[Path, dict[str, Any]]]) -> None:
    assert run("a.yaml", "--verbose", "--log-format", "json").exit_code == 0
    assert launched == [(Path("a.yaml"), {"verbose": True, "log_format": "json"})]


# Models


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make this machine one with an L4, and the hub one with a model; return its directory."""
    folder = write_model(tmp_path / "model", QWEN_7B, QWEN_7B_BYTES)
    monkeypatch.setattr("serve_app.models.devices.find_machine", lambda: machine(L4, cores=8))
    monkeypatch.setattr("serve_app.models.hub.HuggingFaceHub", lambda: FakeHub({"Qwen/Qwen2.5-7B": folder}))
    monkeypatch.setattr("serve_app.system.distribution.installed_build", lambda: "gpu")
    return folder


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the configs that are launched."""
    found: list[str] = []

    def launch(path: Path, **options: Any) -> int:
        assert run(str(path), "--print-config").exit_code == 0
        found.append(path.read_text())
        return 0

    monkeypatch.setattr(serve_app.cli.foreground, "launch", launch)
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(saturate, ["serve", *arguments])


def test_the_demo_is_served_by_default_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, here: Path, texts: list[str]
) -> None:
    monkeypatch.setenv("SATURATE_HOST", "0.0.0.0")
    assert run().exit_code == 0
    assert run("demo").exit_code == 0
    assert texts[0] == texts[1]
    assert "source: saturate://demo" in texts[0]
    assert "host: 0.0.0.0" in texts[0]
    monkeypatch.setenv("SATURATE_HOST", "")
    assert run().exit_code == 0
    assert "host: 127.0.0.1" in texts[2]


@pytest.mark.parametrize("name", ["demo", "Qwen/Qwen2.5-7B"])
def test_what_is_printed_is_what_is_run(name: str, here: Path, texts: list[str], tmp_path: Path) -> None:
    printed = run(name, "--print-config")
    assert (printed.exit_code, printed.stderr, texts) == (0, "", [])
    assert run(name).exit_code == 0
    assert texts == [printed.stdout.replace(" --print-config", "")]
    path = tmp_path / "mine.yaml"
    path.write_text(printed.stdout)
    assert run(str(path)).exit_code == 0
    assert yaml.safe_load(texts[1]) == yaml.safe_load(texts[0])


def test_a_config_is_printed_as_it_is(launched: list[tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    path = tmp_path / "my config.yaml"
    path.write_text(text := "# Mine.\n" + yaml.safe_dump(config()))
    printed = run(str(path), "--print-config")
    assert (printed.exit_code, printed.stdout, printed.stderr, launched) == (0, text, "", [])


def test_a_wrong_config_is_not_printed(launched: list[tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    path = write(tmp_path, config(nonsense=1))
    printed = run(str(path), "--print-config")
    assert (printed.exit_code, printed.stdout) == (2, "")
    assert "args.nonsense: unknown key" in printed.stderr


def test_the_demo_without_a_config_folder_is_that_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    monkeypatch.setattr("serve_app.models.devices.find_machine", lambda: machine())
    printed = yaml.safe_load(run("demo", "--print-config").stdout)
    assert printed == yaml.safe_load((ROOT / "configs/local.yaml").read_text())


def test_a_hub_that_is_away_is_one_line(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setattr("serve_app.models.hub.HuggingFaceHub", lambda: FakeHub({}, away=True))
    said = run("Qwen/Qwen2.5-7B")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("Error: Qwen/Qwen2.5-7B: the hub can't be reached, ")
    assert len(said.stderr.splitlines()) == 1


def test_a_start_says_what_was_chosen(here: Path, texts: list[str]) -> None:
    said = run(str(here)).stderr
    assert f"model      {here}: qwen2, 15.2 GB of weights" in said
    assert "context    max_model_len 15,360: 4.0 requests" in said


def test_options_and_settings_change_the_config(here: Path, texts: list[str]) -> None:
    result = run(
        "--max-model-len", "4k", str(here), "--enforce-eager", "--served-model-name", "mine", "--port", "9000"
    )
    assert result.exit_code == 0, result.stderr
    (text,) = texts
    whole = yaml.safe_load(text)
    (model,) = whole["applications"][0]["args"]["models"]
    assert (model["id"], model["engine"]["max_model_len"], model["engine"]["enforce_eager"]) == (
        "mine",
        4000,
        True,
    )
    assert whole["http_options"]["port"] == 9000
    assert (
        f"saturate serve --max-model-len 4k {here} --enforce-eager --port 9000 --served-model-name mine"
        in (" ".join(text.replace("#", "").split()))
    )


def test_options_without_a_model_are_for_the_demo(here: Path, texts: list[str]) -> None:
    assert run("--port", "9000").exit_code == 0
    assert "source: saturate://demo" in texts[0]
    assert "port: 9000" in texts[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", "8"], "--api-key: `saturate keys new` makes keys"),
        (["demo", "--port", "x"], "--port: Input should be a valid integer"),
        (["demo", "--set", "http.prot=8"], "did you mean port?"),
        (["a", "b"], "one model or config, not 2: a, b"),
        (
            ["a.yaml", "--set", "http.port=1", "--print-config"],
            "a.yaml is a config: change its values in the file",
        ),
    ],
)
def test_a_mistake_is_one_of_usage(arguments: list[str], message: str, here: Path, texts: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, texts) == (2, [])
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Qwen/none"], "no model Qwen/none"),
        (["gpt2"], "neither a config (a file), nor a directory, nor a Hugging Face id"),
        (["Qwen/Qwen2.5-7B", "--set", "engine.tensor_parallel_size=2"], "needs 2 GPUs, and there are 1"),
        (["Qwen/Qwen2.5-7B", "--set", "engine.max_model_len=999999"], "the model doesn't fit one NVIDIA L4"),
    ],
)
def test_a_model_that_is_refused_ends_with_2(
    arguments: list[str], message: str, here: Path, texts: list[str]
) -> None:
    result = run(*arguments)
    assert (result.exit_code, texts) == (2, [])
    assert message in result.stderr


def test_the_help_teaches_how_to_choose() -> None:
    said = run("--help").stdout
    for word in (
        "MODEL",
        "CONFIG",
        "demo",
        "--max-model-len",
        "--set",
        "--print-config",
        "How to choose",
        "Exit codes",
    ):
        assert word in said
