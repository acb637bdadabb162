"""The options of `saturate batch`: their values, those that contradict each other, and the help."""

from itertools import chain
from pathlib import Path

import click
import pytest

from serve_app.cli.main import saturate
from tests.serve_app.dataset.command_line import batch

COMMAND = saturate.commands["batch"].make_context("batch", ["in.jsonl", "out.jsonl"]).command
OPTIONS = [option for option in COMMAND.params if isinstance(option, click.Option)]
TEXTS = [option.opts[0] for option in OPTIONS if isinstance(option.type, click.types.StringParamType)]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


# Help


def test_help_explains_how_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--help") == 0
    text = capsys.readouterr().out
    for word in (
        "hf://openai/gsm8k#main/test",
        "--concurrency",
        "max_num_seqs",
        "Exit codes",
        "--resume",
    ):
        assert word in text


def test_help_has_each_option_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch("--help") == 0
    group, found = "", []
    for line in capsys.readouterr().out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            group = line.removesuffix(":")
        elif line.startswith("  --"):
            found.append((group, line.split()[0].rstrip(",")))
    assert [name for _, name in found] == [*(option.opts[0] for option in OPTIONS), "--help"]
    assert {("Service", "--url"), ("Batch API", "--window"), ("Other options", "--help")} <= set(found)


# Values

OF_DATASETS = [
    *(["--model", "demo"], ["--limit", "1"], ["--chat"], ["--stop", "x"]),
    *([f"--{name}", "0"] for name in ("temperature", "seed", "min-tokens", "top-k", "presence-penalty")),
]
"""Options that do not go with the batch API; a value may be 0."""


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--limit", "0", "0 is not in the range"),
        ("--limit", "1.5", "'1.5' is not a valid integer range"),
        ("--limit", "", "'' is not a valid integer range"),
        ("--limit", "9" * 20, f"{'9' * 20} is not in the range"),
        ("--limit", "9" * 5000, "'999"),
        ("--concurrency", "AUTO", "'AUTO' is not a valid integer range"),
        ("--concurrency", "0", "0 is not in the range"),
        ("--retries", "-1", "-1 is not in the range"),
        *(("--connect-timeout", value, "") for value in ("0", "-1", "nan", "inf", "1e999", "soon", "")),
        ("--service-tier", "gold", "'gold' is not one of 'priority'"),
    ],
)
def test_a_value_that_can_not_be_used_is_told_with_its_option(
    option: str, value: str, message: str, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(requests, "out.jsonl", option, value) == 2
    assert capsys.readouterr().err.startswith(f"error: {option}: {message}")


@pytest.mark.parametrize("option", TEXTS)
def test_a_text_that_is_not_utf_8_is_told_with_its_option(
    option: str, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An argument in Latin-1, as Python decodes it from the command line.
    value = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert batch(requests, "out.jsonl", option, value) == 2
    assert f"error: {option}: must be UTF-8 text, not 'caf\\udce9'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # As from a variable of the shell that is not set: the rows would go to the default service.
        *(([option, ""], f"{option}: the value is empty") for option in ("--url", "--app", "--model")),
        (["--overwrite", "--resume"], "--resume: not allowed with --overwrite"),
        (["--app", "llm", "--url", "http://127.0.0.1:8000"], "--url and --app: take one"),
        (["--app", "llm"], "--app needs --model"),
        (["--window", "2h"], "--window: only with --api"),
        *((["--api", *option], f"{option[0]}: not with --api") for option in OF_DATASETS),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: list[str], message: str, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(requests, "out.jsonl", *arguments) == 2
    assert message in capsys.readouterr().err


def test_without_the_batch_api_an_output_is_needed(
    requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(requests) == 2
    assert "missing argument 'OUTPUT'" in capsys.readouterr().err


# Sampling


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("--temperature", ["nan"], "--temperature: Input should be less than or equal to 2, not nan"),
        ("--temperature", ["2.1"], "--temperature: Input should be less than or equal to 2, not 2.1"),
        ("--top-p", ["0"], "--top-p: Input should be greater than 0, not 0.0"),
        ("--max-tokens", ["0"], "--max-tokens: Input should be greater than or equal to 1, not 0"),
        ("--seed", [str(2**63)], f"--seed: Input should be less than {2**63}, not {2**63}"),
        ("--stop", ["x"] * 65, "--stop: List should have at most 64 items"),
    ],
)
def test_a_sampling_value_out_of_range_is_told_with_its_option(
    option: str, values: list[str], message: str, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = chain.from_iterable((option, value) for value in values)
    assert batch(requests, "out.jsonl", *given) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
