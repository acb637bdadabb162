"""Requests of an engine with adapters, kept apart; a plugin that vLLM loads in each of its processes.

The imports are those of vLLM 0.32.
"""

import os
from typing import Any

ZEROED = "SATURATE_ZERO_BLOCKS"
"""Set in an Engine replica and inherited by the processes it starts; other uses of vLLM stay as they are."""


def zero_blocks() -> None:
    """Have the engine that this process will start zero each block of its KV cache when a request gets it.

    A request whose arithmetic isn't finite leaves NaN in its blocks. The next owner of a block writes its own
    values, but an attention reads the whole block: zero times NaN is NaN.
    """
    os.environ[ZEROED] = "1"


def keep_base_apart() -> None:
    """Keep what a request with an adapter computes out of the others."""
    if ZEROED in os.environ:
        _zero_new_blocks()
    _keep_rows_apart()


def _zero_new_blocks() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    # vLLM does it where layers of another kind need it, and asks this property in each place.
    if not isinstance(KVCacheConfig.__dict__.get("needs_kv_cache_zeroing"), property):
        raise RuntimeError("this vLLM decides otherwise which blocks are zeroed; see vllm_cpu_lora.py")
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


def _keep_rows_apart() -> None:
    """Keep requests without an adapter without one, on a CPU.

    vLLM marks their rows with the index -1. Its operations for a CPU look the adapter up with it, which finds
    the last one: the base model would answer with it. Zeros from the first operation of a layer don't help
    where the second one multiplies them with NaN or infinity.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def masked(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[: len(indices)][indices < 0] = 0

    # One is for prompts, by way of `sgmv_shrink`; the other for the tokens behind them.
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = masked
    for name in ("bgmv_expand", "bgmv_expand_slice"):
        expand = _expanding(getattr(lora_ops, name))
        setattr(lora_ops, name, expand)
        setattr(punica_cpu, name, expand)


def _expanding(expand: Any) -> Any:
    """Return an operation that leaves the rows without an adapter as they are."""

    def masked(inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **options: Any) -> None:
        without = indices < 0
        if not without.any():
            expand(inputs, weights, output, indices, *args, **options)
        elif not without.all():
            kept = output[without].clone()
            expand(inputs, weights, output, indices, *args, **options)
            output[without] = kept

    return masked
