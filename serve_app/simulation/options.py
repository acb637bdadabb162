"""Options of `vllm serve` for an engine on a simulated device."""

from typing import Any

from serve_app.simulation.profiles import BLOCK, OWN, Profile

EXECUTOR = "serve_app.simulation.vllm_executor.SimulatedExecutor"
"""Import path of the executor."""

FIXED = {
    # No weights are loaded, and one process stands for all GPUs of the profile.
    "load_format": "dummy",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "enforce_eager": True,
    "distributed_executor_backend": EXECUTOR,
    "block_size": BLOCK,
}
"""Options that the simulation sets itself."""


def engine_options(profile: Profile, **own: Any) -> dict[str, Any]:
    """Return the options of an engine, with underscores.

    Args:
        profile: The device.
        own: Options of the config; options that the simulation needs for itself are replaced.
    """
    limits = profile.model_dump(include={"max_model_len", "max_num_seqs", "max_num_batched_tokens"})
    options = limits | own | FIXED
    # The profile says how long the context is, not the config of the model that lends its tokenizer.
    overrides = {"max_position_embeddings": options["max_model_len"]} | options.get("hf_overrides", {})
    device = profile.model_dump()
    if options.get("async_scheduling") is not None:
        device["async_scheduling"] = options["async_scheduling"]
    simulated = options.get("additional_config", {}) | {OWN: device}
    return options | {"hf_overrides": overrides, "additional_config": simulated}
