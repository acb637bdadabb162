"""vLLM's options and the limits of admission, from the settings of a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.tool_parsers import ToolParserManager

from serve_app.api.scheduling import FLEX
from serve_app.engine.adapters import AdapterSlots
from serve_app.engine.door import STARTING, EngineLanes
from serve_app.engine.vllm.options import (
    batcher_of,
    limits_of,
    text_batcher_of,
    vllm_args,
)
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from tests.batcher.virtual import virtual


def settings(**fields: Any) -> LLMSettings:
    return LLMSettings.model_validate({"id": "demo", "source": "saturate://demo"} | fields)


def engine(size_tokens: int | None, blocks: int = 9, block: int = 16, policy: str = "priority") -> Any:
    cache = SimpleNamespace(kv_cache_size_tokens=size_tokens, num_gpu_blocks=blocks, block_size=block)
    scheduler = SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=2048, policy=policy)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=cache, scheduler_config=scheduler),
        model_config=SimpleNamespace(max_model_len=512),
    )


def test_options_reach_vllm_by_their_names() -> None:
    args = vllm_args(settings(engine={"max_model_len": 512, "max_logprobs": "3"}))
    assert (args.max_model_len, args.max_logprobs) == (512, 3)
    assert args.served_model_name == ["demo"]
    assert args.model.endswith("model")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_logprbs": 5}, ".max_logprbs: this vLLM has no such option; did you mean max_logprobs?"),
        ({"max_modl_len": 5}, ".max_modl_len: this vLLM has no such option; did you mean max_model_len?"),
        ({"max_logprobs": "many"}, ".max_logprobs: invalid int value: 'many'"),
        ({"logprobs_mode": "x"}, ".logprobs_mode: invalid choice: 'x' (choose from "),
        ({"speculative_config": "x"}, ".speculative_config: Value x is not JSON"),
        ({"enforce_eager": 1}, ".enforce_eager: must be true or false, not 1"),
        ({"enable_log_outputs": True}, ": --enable-log-outputs requires --enable-log-requests"),
        ({"enable_auto_tool_choice": True}, ": --enable-auto-tool-choice requires --tool-call-parser"),
        ({"tool_call_parser": "herms"}, ".tool_call_parser: this vLLM has no parser 'herms'; did you mean h"),
        ({"reasoning_parser": "qwen33"}, ".reasoning_parser: this vLLM has no parser 'qwen33'; did you mean"),
    ],
)
def test_a_refused_option_is_one_line_with_its_path(options: Any, reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        vllm_args(settings(engine=options))
    assert str(caught.value).startswith(f"models[demo].engine{reason}")
    assert "\n" not in str(caught.value)


def test_a_config_and_a_command_line_give_vllm_the_same_values() -> None:
    options = {
        "enforce_eager": False,
        "cudagraph_capture_sizes": [1, 2],
        "hf_overrides": {"a": 1},
        "seed": -1,
    }
    args = vllm_args(settings(engine=options | {"additional_config": {}, "allowed_local_media_path": ""}))
    assert {name: getattr(args, name) for name in options} == options


def test_workers_on_several_nodes_are_actors_of_ray() -> None:
    args = vllm_args(settings(nodes=2, engine={"pipeline_parallel_size": 2}))
    executor = args.distributed_executor_backend
    assert executor.uses_ray
    assert executor.supports_pp
    assert executor.supports_async_scheduling()


def test_a_parser_of_tool_calls_comes_from_a_file(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from vllm.tool_parsers import ToolParserManager\n"
        "from vllm.tool_parsers.abstract_tool_parser import ToolParser\n"
        "@ToolParserManager.register_module('of_a_test')\n"
        "class Mine(ToolParser):\n    pass\n"
    )
    with pytest.raises(KeyError):
        ToolParserManager.get_tool_parser("of_a_test")
    assert vllm_args(settings(engine={"tool_call_parser": "of_a_test", "tool_parser_plugin": str(plugin)}))
    assert ToolParserManager.get_tool_parser("of_a_test").__name__ == "Mine"


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({}, "priority"),
        ({"engine": {"convert": "embed"}}, "priority"),
        ({"engine": {"scheduling_policy": "fcfs"}}, "fcfs"),
    ],
)
def test_vllm_schedules_by_priority_unless_configured(fields: Any, policy: str) -> None:
    assert vllm_args(settings(**fields)).scheduling_policy == policy


@pytest.mark.parametrize(
    ("fields", "text_only"),
    [
        ({}, True),
        ({"multimodal": True}, False),
        ({"engine": {"language_model_only": False}}, False),
    ],
)
def test_a_model_that_takes_text_alone_has_no_encoders(fields: Any, text_only: bool) -> None:
    assert vllm_args(settings(**fields)).language_model_only is text_only


def test_media_are_fetched_from_the_named_hosts_alone() -> None:
    named = {"multimodal": True, "engine": {"allowed_media_domains": ["a.example"]}}
    assert vllm_args(settings(**named)).allowed_media_domains == ["a.example"]
    (none,) = vllm_args(settings()).allowed_media_domains
    assert none == "none, since engine.allowed_media_domains is empty"


@pytest.mark.parametrize(
    ("llm", "capacity"),
    [
        # vLLM keeps one block for itself.
        (engine(1600), 1584),
        (engine(None), 128),
        (engine(16, blocks=2), 16),
        # An encoder has none: then two steps are in flight.
        (engine(None, blocks=1), 4096),
    ],
)
def test_the_capacity_is_the_kv_cache_that_vllm_reports(llm: Any, capacity: int) -> None:
    limits = limits_of(settings().batcher, llm)
    assert (limits.capacity, limits.max_running, limits.places) == (capacity, None, 64)


def test_the_config_may_lower_the_capacity() -> None:
    fields = {"capacity_tokens": 100, "max_running": 3, "tenant_weights": {"a": 2.0}}
    limits = limits_of(settings(batcher=fields).batcher, engine(1600))
    assert limits == (100, 3, 64, {"a": 2.0}, 5_000, FLEX)


@virtual
async def test_batch_work_gives_way_where_vllm_schedules_by_priority() -> None:
    for policy, running in (("priority", True), ("fcfs", False)):
        limits = limits_of(settings().batcher, engine(1600, policy=policy))
        async with batcher_of(settings().batcher, limits, lanes()) as batcher:
            flex, live = batcher.slot_nowait(1584, priority=FLEX), batcher.slot_nowait(1584)
            assert flex.running
            assert live.running is running
            flex.release()
            live.release()


def lanes() -> EngineLanes:
    return EngineLanes(AdapterSlots(1))


def test_the_batcher_keeps_to_the_limits() -> None:
    fields = settings(batcher={"capacity_tokens": 100, "max_running": 3}).batcher
    stats = batcher_of(fields, limits_of(fields, engine(1600)), lanes()).stats
    assert (stats.capacity, stats.max_running) == (100, 3)


@virtual
async def test_few_background_jobs_of_a_batcher_are_not_corrected_yet() -> None:
    limits = limits_of(settings().batcher, engine(1_016))
    async with batcher_of(settings().batcher, limits, lanes()) as batcher:
        slots = [batcher.slot_nowait(1, priority=1) for _ in range(STARTING + 2)]
        assert batcher.stats.running == STARTING
        slots[0].correct(1, 0)
        assert batcher.stats.running == STARTING + 1
        for slot in slots:
            slot.release()


def test_few_jobs_that_run_no_model_run_at_once() -> None:
    assert text_batcher_of(settings().batcher, lanes()).stats.max_running == STARTING


def test_a_simulated_device_gets_its_executor_and_its_limits() -> None:
    simulated = LLMSettings.model_validate(
        {"id": "fast", "simulate": "h100-8b", "engine": {"max_num_seqs": 7, "enable_prefix_caching": False}}
    )
    args = vllm_args(simulated)
    assert args.distributed_executor_backend.endswith("SimulatedExecutor")
    assert args.additional_config["simulate"]["name"] == "h100-8b"
    assert (args.max_num_seqs, args.max_model_len) == (7, 131_072)
    assert args.enable_prefix_caching is False
    assert args.model.endswith("demo/model")
