"""Options of `vllm serve`: vLLM's own parser reads and checks them, and each has its place."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from serve_app.engine.vllm.parser import OptionParser, answer
from serve_app.models.errors import OptionError
from serve_app.models.families import RULES
from serve_app.models.overrides import Override, engine_options, read_options, read_setting
from serve_app.settings.schema import SettingsError, parse
from serve_app.settings.serve_options import MOVED, REFUSED

OWN = ["--set", "--print-config", "--verbose"]

SERVED = {
    *("chat_template", "chat_template_content_format", "trust_request_chat_template", "response_role"),
    *("trust_request_mm_kwargs", "default_chat_template_kwargs", "return_tokens_as_token_ids"),
    *("enable_auto_tool_choice", "exclude_tools_when_tool_choice_none", "tool_call_parser"),
    *("tool_parser_plugin", "tool_strict_level", "tool_server", "max_log_len", "log_error_stack"),
    *("enable_prompt_tokens_details", "enable_per_request_metrics", "enable_force_include_usage"),
    *("sse_keep_alive_interval", "enable_log_outputs", "enable_log_deltas", "cohere_format"),
    *("anthropic_disabled_thinking_effort", "fingerprint_mode", "fingerprint_value"),
}
"""Options of vLLM's server that its application reads behind the Ingress, judged one by one."""


def asked(question: dict[str, Any]) -> Any:
    """Return the answer that the program would print."""
    return json.loads(json.dumps(answer(**question)))


def read(words: str) -> tuple[list[str], list[Override]]:
    return read_options(words.split(), OWN, ask=asked)


def test_each_option_of_vllms_server_has_its_place() -> None:
    engine = {field.name for field in fields(AsyncEngineArgs)}
    assert set(OptionParser().options) - engine == {*SERVED, *MOVED, *REFUSED} - engine
    assert not SERVED & {*MOVED, *REFUSED}


def test_vllm_has_the_parsers_of_every_family() -> None:
    tools, reasoning = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    assert {rule.parsers.tools for rule in RULES} - {None} <= set(tools)
    assert {rule.parsers.reasoning for rule in RULES} - {None} <= set(reasoning)


@pytest.mark.parametrize(
    ("words", "names", "engine"),
    [
        ("--max-model-len 8k model", ["model"], {"max_model_len": 8000}),
        ("a --max_model_len=-1 b", ["a", "b"], {"max_model_len": -1}),
        (
            "model --no-enable-prefix-caching -tp 2",
            ["model"],
            {"enable_prefix_caching": False, "tensor_parallel_size": 2},
        ),
        ("--cudagraph-capture-sizes 1 2 --seed -1", [], {"cudagraph_capture_sizes": [1, 2], "seed": -1}),
        ("-cc.mode 3 -O3", [], {"compilation_config": {"mode": 3}, "optimization_level": "3"}),
        ("--speculative-config.model x", [], {"speculative_config": {"model": "x"}}),
    ],
)
def test_options_of_vllm_go_to_the_engine(words: str, names: list[str], engine: dict[str, Any]) -> None:
    found, overrides = read(words)
    assert found == names
    assert engine_options(overrides) == engine


def test_adapters_origins_and_files_go_to_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "capitals").mkdir()
    (tmp_path / "chat.jinja").touch()
    words = '--lora-modules capitals=capitals {"name":"two","path":"org/two"} --chat-template chat.jinja'
    _, overrides = read(words + ' --allowed-origins ["https://a.example"]')
    adapters = [{"id": "capitals", "source": f"{tmp_path}/capitals"}, {"id": "two", "source": "org/two"}]
    assert sorted(overrides, key=str) == [
        Override("args", ("ingress", "allow_origins"), ["https://a.example"]),
        Override("model", ("adapters",), adapters),
        # The engine reads the file, in another directory.
        Override("model", ("engine", "chat_template"), f"{tmp_path}/chat.jinja"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-modl-len 8", "no such option: --max-modl-len; did you mean --max-model-len?"),
        ("--print-confg", "did you mean --print-config?"),
        ("--max-logprobs many", "--max-logprobs: invalid int value: 'many'"),
        ("--compilation-config.modd 3", "CompilationConfig modd Unexpected keyword argument"),
        ("--max-model-len --enforce-eager", "--max-model-len: expected one argument"),
        ("--served_model_name a", "write --served-model-name"),
        ("-dp 1", "--data-parallel-size: `deployment.num_replicas` gives the copies"),
        ("--api-key=x", "--api-key: `saturate keys new` makes keys"),
    ],
)
def test_a_wrong_option_is_refused_with_the_right_one(words: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(words)
    assert message in str(caught.value)


def test_other_values_of_the_user_are_checked_too() -> None:
    with pytest.raises(OptionError, match="max_logprbs: this vLLM has no such option; did you mean max_logp"):
        read_options(["demo"], OWN, [read_setting("engine.max_logprbs=5")], asked)
    assert read_options(["demo"], OWN, [read_setting("engine.max_logprobs=5")], asked) == (["demo"], [])


@pytest.mark.parametrize("name", [*REFUSED, *MOVED, "extra"])
def test_what_the_service_does_itself_is_refused(name: str) -> None:
    reason = REFUSED.get(name) or ("its options go" if name == "extra" else f"set {MOVED[name]} instead")
    with pytest.raises(SettingsError) as wrong:
        parse({"models": [{"id": "m", "source": "s", "engine": {name: {"x": 1}}}]})
    assert f"args.models[0].engine: {name}: {reason}" in str(wrong.value)
    with pytest.raises(OptionError) as caught:
        read_setting(f"engine.{name}=x")
    assert f"--set engine.{name}: {reason}" in str(caught.value)
