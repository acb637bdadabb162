"""Correction of vLLM's LoRA operations on a CPU; a plugin that vLLM loads in each of its processes.

Only files named vllm_* import vllm. The imports are those of vLLM 0.32.
"""

from typing import Any


def keep_base_apart() -> None:
    """Keep requests without an adapter without one, on a CPU.

    vLLM marks their rows with the index -1. Its operations for a CPU look the adapter up with it, which finds
    the last one: the base model would answer with it. The first operation of each layer shrinks the input;
    where it gives zeros, the second one adds nothing.
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
