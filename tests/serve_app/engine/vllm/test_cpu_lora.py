"""vLLM's LoRA operations on a CPU, as this project corrects them."""

import pytest
import torch
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.kv_cache_interface import KVCacheConfig

from serve_app.engine.vllm.cpu_lora import ZEROED, keep_base_apart


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


def test_numbers_of_an_adapter_do_not_reach_rows_without_one() -> None:
    keep_base_apart()
    nan = float("nan")
    inputs, weights = torch.ones(3, 2), torch.stack([torch.ones(4, 2), torch.full((4, 2), nan)])
    indices, base = torch.tensor([0, -1, -1]), torch.full((3, 4), 9.0)
    punica_cpu.bgmv_expand(inputs, weights, rows := base.clone(), indices, True)
    assert rows.tolist() == [[11.0] * 4, [9.0] * 4, [9.0] * 4]
    punica_cpu.bgmv_expand(inputs, weights, rows := base.clone(), torch.tensor([-1, -1, -1]), True)
    assert rows.tolist() == base.tolist()
    lengths, starts = torch.tensor([1, 2]), torch.tensor([0, 1])
    arguments = (starts, lengths, torch.tensor([0, -1]), 2, 2, 3)
    punica_cpu.sgmv_expand(inputs, weights, rows := base.clone(), *arguments, True)
    assert rows.tolist() == [[11.0] * 4, [9.0] * 4, [9.0] * 4]
    punica_cpu.sgmv_expand_slice(inputs, weights, rows := torch.full((3, 8), 9.0), *arguments, 4, 4, True)
    assert rows.tolist() == [[9.0] * 4 + [11.0] * 4, [9.0] * 8, [9.0] * 8]


def test_an_engine_that_is_told_so_zeroes_the_blocks_of_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # Put back afterwards.
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", KVCacheConfig.needs_kv_cache_zeroing)
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    monkeypatch.delenv(ZEROED, raising=False)
    keep_base_apart()
    assert not config.needs_kv_cache_zeroing
    monkeypatch.setenv(ZEROED, "1")
    keep_base_apart()
    assert config.needs_kv_cache_zeroing
