"""vLLM's LoRA operations on a CPU, as this project corrects them."""

import torch
from vllm.lora.punica_wrapper import punica_cpu

from serve_app.engine.vllm_cpu_lora import keep_base_apart


def test_rows_without_an_adapter_stay_without_one() -> None:
    keep_base_apart()
    inputs, weights = torch.ones(3, 4), torch.stack([torch.ones(2, 4), 2 * torch.ones(2, 4)])
    tokens, prompts = torch.full((3, 2), 9.0), torch.full((3, 2), 9.0)
    punica_cpu.bgmv_shrink(inputs, weights, tokens, torch.tensor([0, -1, 1]), 0.5)
    assert tokens.tolist() == [[2.0, 2.0], [0.0, 0.0], [4.0, 4.0]]
    lengths = torch.tensor([2, 1])
    starts = torch.tensor([0, 2])
    punica_cpu.sgmv_shrink(inputs, weights, prompts, starts, lengths, torch.tensor([-1, 1]), 2, 2, 3, 0.5)
    assert prompts.tolist() == [[0.0, 0.0], [0.0, 0.0], [4.0, 4.0]]
