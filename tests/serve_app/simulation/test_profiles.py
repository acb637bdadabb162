"""Profiles: built-in ones, and a user's own from a file; each mistake is named with its path."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError, parse
from serve_app.simulation.profiles import PROFILES, Profile, read_profile
from tests.serve_app.simulation.virtual import NUMBERS, profile


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    write(path)
    return path


def write(path: Path, **changes: Any) -> None:
    """Write the fields without a name, each with its change; None removes it."""
    fields = {key: value for key, value in (NUMBERS | changes).items() if value is not None and key != "name"}
    path.write_text(yaml.safe_dump(fields))


def refusal(value: object) -> str:
    with pytest.raises(SettingsError) as refused:
        parse({"models": [{"id": "demo", "simulate": value}]})
    return str(refused.value)


def test_the_built_in_profiles_have_their_names() -> None:
    assert set(PROFILES) == {"h100-7b", "l4-7b", "h100-8b", "h100-70b-tp4"}
    for name, each in PROFILES.items():
        assert read_profile(name) is each
        assert each.name == name


@pytest.mark.parametrize(
    ("name", "weights_gb", "bandwidth_gb_s", "kv_bytes", "memory_gb"),
    [
        ("l4-7b", 15.2, 300, 57_344, 24),
        ("h100-8b", 16.1, 3350, 131_072, 80),
        ("h100-70b-tp4", 141.2, 4 * 3350, 327_680, 320),
    ],
)
def test_a_built_in_profile_is_possible_on_its_hardware(
    name: str, weights_gb: float, bandwidth_gb_s: float, kv_bytes: float, memory_gb: float
) -> None:
    device = PROFILES[name]
    # No step is faster than the weights come from memory, and the cache fits beside them.
    assert device.base_ms >= weights_gb / bandwidth_gb_s * 1000
    # Context comes at the measured share of the bandwidth at least.
    assert 1 <= device.per_kv_token_ms * bandwidth_gb_s * 1e6 / kv_bytes * 1.03 <= 2.1
    assert device.kv_tokens * kv_bytes / 1e9 + weights_gb < 0.9 * memory_gb


def test_a_file_has_the_fields_and_its_name_is_the_profiles(file: Path) -> None:
    assert read_profile(str(file)) == profile(name="mine")
    file.write_text(yaml.safe_dump(NUMBERS))
    assert read_profile(str(file)) == profile(name="round")


def test_the_settings_take_a_name_or_a_file_or_the_fields(file: Path) -> None:
    for value, name in (("h100-8b", "h100-8b"), (str(file), "mine"), (NUMBERS, "round")):
        (model,) = parse({"models": [{"id": "demo", "simulate": value}]}).models
        assert isinstance(model, LLMSettings)
        assert model.simulate is not None
        assert model.simulate.name == name
        assert model.source == "saturate://demo"


def test_a_model_without_a_simulated_device_needs_a_source() -> None:
    with pytest.raises(SettingsError, match=r"models\[0\]\.source: required"):
        parse({"models": [{"id": "demo"}]})


def test_a_name_that_does_not_exist_says_which_do() -> None:
    for value in ("h200", "profiles/mine.yaml"):
        said = refusal(value)
        assert (
            "args.models[0].simulate: must be 'h100-7b', 'l4-7b', 'h100-8b', 'h100-70b-tp4', or the abs"
            in said
        )
        assert repr(value) in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_ms": None}, "base_ms: required, but missing"),
        ({"base_ms": 0.0}, "base_ms: Input should be greater than 0, not 0.0"),
        ({"load_s": "fast"}, "load_s: Input should be a valid number, not 'fast'"),
        ({"wake_s": float("inf")}, "wake_s: Input should be a finite number, not inf"),
        ({"kv_tokens": 1.5}, "kv_tokens: Input should be a valid integer, not 1.5"),
        ({"per_token_ms": 1.0}, "per_token_ms: unknown key; did you mean per_kv_token_ms?"),
        ({"kv_tokens": 256}, "kv_tokens: 256 is below max_model_len (512)"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_both_paths(
    file: Path, changes: dict[str, Any], message: str
) -> None:
    write(file, **changes)
    assert f"args.models[0].simulate: {file}: {message}" in refusal(str(file))


def test_every_mistake_in_a_file_is_named(file: Path) -> None:
    write(file, base_ms=None, sleep_s=-1.0)
    said = refusal(str(file))
    assert "base_ms: required" in said
    assert "sleep_s: Input should be greater" in said


def test_a_mistake_in_fields_is_named_with_its_path() -> None:
    fields = {key: value for key, value in NUMBERS.items() if key != "base_ms"}
    said = refusal(fields | {"wake_s": -1.0, "typo": 1})
    assert "args.models[0].simulate.base_ms: required, but missing" in said
    assert "args.models[0].simulate.wake_s: Input should be greater than or equal to 0, not -1.0" in said
    assert "args.models[0].simulate.typo: unknown key; " in said


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert "nothing.yaml: can't be read: No such file" in refusal(str(tmp_path / "nothing.yaml"))
    (tmp_path / "broken.yaml").write_text("base_ms: [")
    assert "broken.yaml: this is not YAML: " in refusal(str(tmp_path / "broken.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    assert "list.yaml: Input should be a valid dictionary" in refusal(str(tmp_path / "list.yaml"))


def test_a_profile_does_not_change() -> None:
    device: Any = profile()
    with pytest.raises(ValidationError):
        device.base_ms = 1.0
    assert isinstance(device, Profile)
