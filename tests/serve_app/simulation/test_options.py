"""Options of vLLM for a simulated engine."""

from serve_app.simulation.options import EXECUTOR, engine_options
from tests.serve_app.simulation.virtual import profile


def test_the_profile_sets_the_limits() -> None:
    options = engine_options(profile(max_num_seqs=7))
    assert (options["max_model_len"], options["max_num_seqs"]) == (512, 7)
    assert options["max_num_batched_tokens"] == 8192
    assert options["distributed_executor_backend"] == EXECUTOR
    assert options["additional_config"]["simulate"]["base_ms"] == 10.0


def test_the_config_may_change_the_limits() -> None:
    options = engine_options(profile(), max_model_len=64, max_num_seqs=3)
    assert (options["max_model_len"], options["max_num_seqs"]) == (64, 3)
    assert options["hf_overrides"] == {"max_position_embeddings": 64}


def test_what_the_simulation_needs_replaces_the_config() -> None:
    own = {"tensor_parallel_size": 4, "distributed_executor_backend": "mp", "load_format": "auto"}
    options = engine_options(profile(), **own)
    assert options["tensor_parallel_size"] == 1
    assert options["distributed_executor_backend"] == EXECUTOR
    assert options["load_format"] == "dummy"


def test_other_options_stay() -> None:
    own = {"additional_config": {"a": 1}, "hf_overrides": {"b": 2}, "enable_prefix_caching": False}
    options = engine_options(profile(), **own)
    assert options["enable_prefix_caching"] is False
    assert options["hf_overrides"] == {"max_position_embeddings": 512, "b": 2}
    assert options["additional_config"]["a"] == 1


def test_the_config_may_turn_scheduling_ahead_off() -> None:
    ahead = engine_options(profile(async_scheduling=True))
    one_by_one = engine_options(profile(async_scheduling=True), async_scheduling=False)
    assert ahead["additional_config"]["simulate"]["async_scheduling"] is True
    assert one_by_one["additional_config"]["simulate"]["async_scheduling"] is False
