"""The options that the trainings share."""

from pathlib import Path

import pytest

from serve_app.demo.options import training_parser


def test_the_defaults_are_those_of_the_training() -> None:
    options = training_parser("a.b", "Train it.", out=Path("/tmp/x"), steps=7).parse_args([])
    assert vars(options) == {"out": Path("/tmp/x"), "steps": 7, "seed": 0, "threads": 2}


def test_a_training_may_have_options_of_its_own() -> None:
    parser = training_parser("a.b", "Train it.", out=Path("/tmp/x"), steps=7)
    parser.add_argument("styles", nargs="*")
    options = parser.parse_args(["--steps", "2", "--out", "y", "letters"])
    assert (options.steps, options.out, options.styles) == (2, Path("y"), ["letters"])


def test_help_names_the_command_and_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    parser = training_parser("a.b", "Train\nit.", out=Path("/tmp/x"), steps=7, examples="examples:\n  a.b")
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m a.b")
    assert "Train\nit." in shown
    assert "default: 7" in shown
    assert shown.endswith("examples:\n  a.b\n")
