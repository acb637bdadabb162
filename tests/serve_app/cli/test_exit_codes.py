"""One rule for the exit codes of all commands: serve_app/docs/reference/exit-codes.md has it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from serve_app.cli.main import saturate
from serve_app.system.command_line import run
from tests.serve_app.cli.services import config, free_port, write

GOAL = ["--goal", "ttft_p99<0.5"]
LENGTHS = ["--rate", "1", "--input", "10", "--output", "10"]

# vLLM's parser reads the options that `serve` doesn't have, in a process of its own.
UNKNOWN = {name: [name, "--no-such-option"] for name in saturate.commands if name != "serve"} | {
    "keys": ["keys", "list", "--no-such-option"]
}

MISSING = {
    "serve": ["serve", "none.yaml"],
    "serve a directory": ["serve", "./none"],
    "serve --print-config": ["serve", "none.yaml", "--print-config"],
    "batch": ["batch", "none.jsonl", "out.jsonl"],
    "batch --api": ["batch", "--api", "none.jsonl"],
    "batch --template": ["batch", "in.jsonl", "out.jsonl", "--template", "@none"],
    "keys list": ["keys", "list", "none.yaml"],
    "keys check": ["keys", "check", "none.yaml"],
    "usage": ["usage", "none"],
    "usage --config": ["usage", "--config", "none.yaml"],
    "doctor": ["doctor", "none.yaml"],
    "plan --device": ["plan", *LENGTHS, *GOAL, "--device", "none.yaml"],
    "tune --from": ["tune", *GOAL, "--from", "none.json"],
    "tune --write": ["tune", *GOAL, "--write", "none.yaml"],
    "tune --json": ["tune", *GOAL, "--json", "none/out.json"],
    "profile --output": ["profile", "localhost", "--output", "none/gpu.yaml"],
    "top --api-key-env": ["top", "--api-key-env", "NO_SUCH_VARIABLE"],
}
"""Commands that name something that isn't there."""

AWAY = {
    "batch": ["batch", "in.jsonl", "out.jsonl", "--retries", "0", "--quiet", "--url", "URL"],
    "batch --api": ["batch", "--api", "requests.jsonl", "--retries", "0", "--url", "URL"],
    "top": ["top", "URL"],
    "top --json": ["top", "URL", "--json"],
    "tune": ["tune", *GOAL, "URL"],
    "profile": ["profile", "URL"],
}
"""Commands that need a service."""

BROKEN = {
    "no YAML": "a: [1",
    "a list": "- 1",
    "a number": "5",
    "empty": "",
    "an impossible date": "a: 2026-99-99",
    "applications of another form": "applications: 5",
    "an application of another form": "applications: [5]",
    "args of another form": "applications: [{import_path: 'serve_app.app:build', args: 5}]",
    "models of another form": "applications: [{import_path: 'serve_app.app:build', args: {models: 5}}]",
    "no models": "applications: [{import_path: 'serve_app.app:build'}]",
}

READERS = {
    "serve": (2, ["serve", "CONFIG"]),
    "serve --print-config": (2, ["serve", "CONFIG", "--print-config"]),
    "usage": (2, ["usage", "--config", "CONFIG"]),
    "tune --write": (2, ["tune", *GOAL, "URL", "--write", "CONFIG"]),
    # It is there to find this.
    "doctor": (1, ["doctor", "CONFIG"]),
}
"""Commands that read a config, and their exit codes for a broken one."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "requests.jsonl").write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions"}\n'
    )


def code_of(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command and its output on standard error, which has no stack trace."""
    url = f"localhost:{free_port()}"
    with pytest.raises(SystemExit) as ended:
        run(saturate, [{"URL": url, "CONFIG": "config.yaml"}.get(word, word) for word in arguments])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "the stack is in" not in said
    assert isinstance(ended.value.code, int)
    return ended.value.code, said


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_option_is_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = code_of(UNKNOWN[case], capsys)
    assert code == 2
    assert said.startswith("error: no such option")


@pytest.mark.parametrize("case", MISSING)
def test_what_is_not_there_is_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = code_of(MISSING[case], capsys)
    assert code == 2, said
    assert said.startswith("error: ")
    assert "none" in said or "NO_SUCH_VARIABLE" in said


@pytest.mark.parametrize("case", AWAY)
def test_no_service_is_1(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = code_of(AWAY[case], capsys)
    assert code == 1, said
    assert "error: " in said
    assert "http://localhost:" in said


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("case", READERS)
def test_a_broken_config_is_2_and_for_the_doctor_a_problem(
    case: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, BROKEN[text])
    wanted, arguments = READERS[case]
    code, said = code_of(arguments, capsys)
    assert code == wanted, said


def test_a_stop_without_a_service_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["stop", "--port", str(free_port())], capsys)[0] == 0


@pytest.mark.parametrize("arguments", [["top"], ["profile"], ["tune", *GOAL]], ids=lambda words: words[0])
def test_an_address_of_another_form_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, said = code_of([*arguments, "ftp://x"], capsys)
    assert (code, said.partition(" (see")[0]) == (
        2,
        "error: URL: ftp://x: must begin with http:// or https://",
    )


def test_a_taken_port_is_1_since_the_command_is_right(
    tmp_path: Path, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, config(taken))
    code, said = code_of(["serve", "config.yaml"], capsys)
    assert code == 1, said
