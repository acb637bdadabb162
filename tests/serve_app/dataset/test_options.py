"""The options of `saturate batch`: their values, those that contradict each other, and the help."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from serve_app.api.protocol import SamplingFields
from serve_app.dataset.command import main
from serve_app.dataset.options import (
    ARGUMENTS,
    DEFAULT_URL,
    GROUPS,
    SAMPLING,
    GroupedCommand,
    chosen,
    sampling_fields,
)
from serve_app.rows.errors import RunError

OPTIONS = list(chain.from_iterable(GROUPS.values()))
TEXTS = [option.opts[0] for option in OPTIONS if isinstance(option.type, click.types.StringParamType)]


def options(*arguments: str) -> SimpleNamespace:
    """Return the options of a command line that begins with an input and an output."""
    command = GroupedCommand(name="batch", groups=GROUPS, params=ARGUMENTS)
    return chosen(command.make_context("batch", ["in.jsonl", "out.jsonl", *arguments]).params)


def batch(*arguments: object) -> int:
    """Run the command in this process and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


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
    expected = [(group, option.opts[0]) for group, members in GROUPS.items() for option in members]
    assert found == [*expected, ("Other options", "--help")]


# Values


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


@pytest.mark.parametrize("option", ["--url", "--app", "--model"])
def test_a_service_is_not_named_by_an_empty_text(option: str) -> None:
    # As from a variable of the shell that is not set: the rows would go to the default service.
    with pytest.raises(click.UsageError, match=f"{option}: the value is empty"):
        options(option, "")


def test_the_service_is_on_this_machine_unless_another_is_named() -> None:
    assert options().url == DEFAULT_URL
    assert options("--url", "http://other").url == "http://other"
    assert options("--app", "llm", "--model", "m").url is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--overwrite", "--resume"], "--resume: not allowed with --overwrite"),
        (["--app", "llm", "--url", DEFAULT_URL], "--url and --app: take one"),
        (["--app", "llm"], "--app needs --model"),
        (["--window", "2h"], "--window: only with --api"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        options(*arguments)


# The batch API


@pytest.mark.parametrize("option", [["--model", "demo"], ["--limit", "1"], ["--chat"], ["--stop", "x"]])
def test_an_option_of_datasets_is_refused(
    option: list[str], requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch("--api", requests, *option) == 2
    assert f"{option[0]}: not with --api" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["temperature", "seed", "min-tokens", "top-k", "presence-penalty"])
def test_a_zero_of_datasets_is_refused_too(name: str) -> None:
    with pytest.raises(click.UsageError, match=f"--{name}: not with --api"):
        options("--api", f"--{name}", "0")


def test_the_options_of_the_batch_api_are_taken() -> None:
    names = ["url", "api-key-env", "window", "retries"]
    names += ["connect-timeout", "read-timeout", "write-timeout", "pool-timeout"]
    found = options("--api", "--overwrite", "--quiet", *chain.from_iterable((f"--{n}", "7") for n in names))
    assert {str(getattr(found, name.replace("-", "_"))) for name in names} == {"7", "7.0"}
    assert (found.api, found.overwrite, found.quiet) == (True, True, True)


def test_without_the_batch_api_an_output_is_needed(
    requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(requests)])
    assert ended.value.code == 2
    assert "missing argument 'OUTPUT'" in capsys.readouterr().err


# Sampling


def test_only_the_sampling_fields_that_are_given_are_sent() -> None:
    assert sampling_fields(options()) == {}
    given = options("--temperature", "0", "--seed", "0", "--max-tokens", "9", "--stop", "é", "--stop", "\n")
    assert sampling_fields(given) == {"temperature": 0, "seed": 0, "max_tokens": 9, "stop": ["é", "\n"]}


def test_a_sampling_option_is_a_field_of_the_api() -> None:
    assert SAMPLING.keys() <= SamplingFields.model_fields.keys()


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
    option: str, values: list[str], message: str
) -> None:
    with pytest.raises(RunError) as caught:
        sampling_fields(options(*chain.from_iterable((option, value) for value in values)))
    assert str(caught.value).startswith(message)
