"""All options of `vllm serve`, as vLLM's own parser has them: what `saturate serve` does with each."""

from typing import Any

import pytest
import yaml

from serve_app.models import installed_vllm
from serve_app.models.errors import OptionError
from serve_app.models.overrides import Override, read_options, read_setting
from serve_app.settings.models import EngineSettings
from serve_app.settings.schema import SettingsError, parse
from serve_app.settings.serve_options import DONE, MOVED, REFUSED

UNKNOWN_CHOICES = {
    *(
        "offload_backend",
        "mm_encoder_attn_dtype",
        "video_pruning_method",
        "mm_processor_device",
        "lora_dtype",
    ),
    *(
        "collect_detailed_traces",
        "spec_method",
        "moe_backend",
        "linear_backend",
        "sparse_indexer_topk_backend",
    ),
}
"""Options whose values aren't listed in their type; vLLM checks them at the start of an engine."""

JSON_WORDS = {"allowed_origins", "allowed_methods", "allowed_headers", "middleware"}
"""Lists that vLLM takes from one word."""


@pytest.fixture(scope="session")
def actions(vllm_app: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of vLLM's parser, without the model, which has no form."""
    return [action for action in vllm_app["options"] if action["strings"]]


def test_the_options_are_those_of_vllms_parser(actions: list[dict[str, Any]]) -> None:
    found = installed_vllm.options()
    assert set(found) == {action["name"] for action in actions}
    for action in actions:
        option = found[action["name"]]
        forms = [form for form in action["strings"] if not form.startswith("--no-")]
        assert sorted(option.strings) == sorted(forms)
        assert (option.flag, option.negatable) == (action["flag"], action["negatable"]), option
        assert option.several == action["several"] or option.name in JSON_WORDS, option
        if option.name not in UNKNOWN_CHOICES:
            assert set(action["choices"]) <= set(map(str, option.choices)), option
            assert bool(action["choices"]) == bool(option.choices) or "str" in option.types, option


def test_each_option_is_done_moved_or_refused_with_the_setting(actions: list[dict[str, Any]]) -> None:
    assert len({*DONE, *MOVED, *REFUSED}) == len(DONE) + len(MOVED) + len(REFUSED)
    options = installed_vllm.options()
    assert {name for name, option in options.items() if option.server} == (
        {name for name in (*DONE, *MOVED, *REFUSED) if options[name].server}
    ), "an option of vLLM's server is in none of the tables"
    for action in actions:
        for form in action["strings"]:
            _check(options[action["name"]], form)


def _check(option: installed_vllm.Option, form: str) -> None:
    words = [form] if option.flag else [form, _value(option)]
    if option.name in REFUSED:
        with pytest.raises(OptionError) as caught:
            read_options(words, [])
        assert str(caught.value) == f"{form}: {REFUSED[option.name]}"
        return
    names, overrides = read_options(words, [])
    assert names == []
    (override,) = overrides
    if option.name in MOVED:
        assert override.part != "model" or override.place[0] != "engine", override
    elif option.name in EngineSettings.model_fields:
        assert (override.part, override.place) == ("model", ("engine", option.name))
    else:
        assert (override.part, override.place) == ("model", ("engine", "extra", option.name))
        # The schema of a config takes what the command line makes of it.
        _parse(override)
    if option.flag:
        assert override.value is not form.startswith("--no-")


def _value(option: installed_vllm.Option) -> str:
    """Return a right value of an option."""
    if option.name == "lora_modules":
        return "a=/b"
    if option.choices:
        return str(option.choices[0])
    for kind, text in (("int", "1"), ("float", "0.5"), ("dict", "{}"), ("list", "[]"), ("set", "[]")):
        if kind in option.types:
            return text
    return "true" if "bool" in option.types else "x"


def _parse(override: Override) -> None:
    extra = {override.place[-1]: override.value}
    parse(
        {"models": [{"id": "m", "source": "s", "engine": {"extra": yaml.safe_load(yaml.safe_dump(extra))}}]}
    )


@pytest.mark.parametrize("name", [*REFUSED, *MOVED])
def test_a_config_is_refused_with_the_setting_too(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse({"models": [{"id": "m", "source": "s", "engine": {"extra": {name: "x"}}}]})
    assert f"args.models[0].engine: extra.{name}: {REFUSED.get(name) or 'set ' + MOVED[name]}" in str(
        caught.value
    )
    with pytest.raises(OptionError):
        read_setting(f"engine.{name}=x")
