"""The reference of the settings is that of the code, and configs keep to the JSON Schema."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from serve_app.auth.keys import Key
from serve_app.cli.main import saturate
from serve_app.settings.fields import Strict
from serve_app.settings.json_schema import config_schema
from serve_app.system.distribution import version
from tests.reference import FOLDERS, PAGES, ROOT

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(config_schema())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_files_are_made_from_the_code(path: Path) -> None:
    assert path.read_text() == PAGES[path](), "run make reference"


def test_the_map_has_every_folder() -> None:
    folders = {
        str(path.parent.relative_to(ROOT))
        for name in ("batcher", "serve_app")
        for path in (ROOT / name).rglob("*.py")
    }
    assert folders == set(FOLDERS)


def test_the_command_prints_the_schema() -> None:
    assert json.loads(CliRunner().invoke(saturate, ["schema"]).output) == config_schema()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_config_keeps_to_the_schema(path: Path, validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ingres": {}}, "'ingres' was unexpected"),
        ({"ingress": {"max_n": 0}}, "less than the minimum of 1"),
        ({"usage": {"quotas": {"when_away": "open"}}}, "'open' is not one of"),
    ],
)
def test_a_mistake_in_the_args_is_one_in_the_schema(
    change: dict[str, Any], words: str, validator: jsonschema.Draft202012Validator
) -> None:
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    config["applications"][0]["args"] |= change
    found = [
        each.message for error in validator.iter_errors(config) for each in [error, *(error.context or ())]
    ]
    assert any(words in message for message in found), found


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Return all sections of the settings."""
    return [found for kind in model.__subclasses__() for found in (kind, *sections(kind))]


def test_every_setting_has_a_description() -> None:
    assert issubclass(Key, Strict)
    missing = [
        f"{section.__name__}.{name}"
        for section in sections(Strict)
        if section.__module__.startswith("serve_app.")
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert missing == []


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    (first, *_) = re.findall(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == version()
