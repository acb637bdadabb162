"""The memory of a device holds the weights, the reserve and the KV cache of a model."""

import pytest

from serve_app.models.architecture import Architecture
from serve_app.models.memory import (
    CPU_KV_MOST,
    CPU_KV_STEP,
    CPU_RESERVE,
    CPU_UTILIZATION,
    RESERVE,
    demand,
    gb,
    with_kv_cache,
)
from serve_app.models.model_files import ModelFiles

# The shape of Llama 3 8B: 32 layers, 8 heads with a cache, 128 values each for key and value.
SHAPE = Architecture("llama", "bfloat16", None, 8192, 32, 8, 32, 2 * 128)
FILES = ModelFiles("meta/llama", {}, 16_000_000_000)
GPU = 80 * 10**9


def test_the_cache_has_what_weights_and_reserve_leave() -> None:
    sums = demand(FILES, SHAPE, "bfloat16", None).on_gpu(GPU, 0.9, 1)
    assert sums.usable == 72 * 10**9
    assert sums.kv_cache == sums.usable - FILES.weight_bytes - RESERVE
    assert sums.per_token == 32 * 8 * 2 * 128 * 2
    assert sums.tokens == sums.kv_cache // 131_072


@pytest.mark.parametrize(("parallel", "stages"), [(2, 1), (1, 2), (4, 2)])
def test_devices_share_weights_and_cache(parallel: int, stages: int) -> None:
    one = demand(FILES, SHAPE, "bfloat16", None).on_gpu(GPU, 0.9, 1)
    each = demand(FILES, SHAPE, "bfloat16", None).on_gpu(GPU, 0.9, parallel, stages)
    assert each.weights == one.weights // (parallel * stages)
    assert each.per_token == one.per_token // (parallel * stages)


def test_more_devices_than_heads_keep_a_head_each() -> None:
    eight = demand(FILES, SHAPE, "bfloat16", None).on_gpu(GPU, 0.9, 8)
    sixteen = demand(FILES, SHAPE, "bfloat16", None).on_gpu(GPU, 0.9, 16)
    assert sixteen.per_token == eight.per_token


def test_nothing_is_left_where_the_weights_do_not_fit() -> None:
    sums = demand(FILES, SHAPE, "bfloat16", None).on_gpu(16 * 10**9, 0.9, 1)
    assert (sums.kv_cache, sums.tokens) == (0, 0)


def test_types_change_the_bytes_of_weights_and_cache() -> None:
    wide = demand(FILES, SHAPE, "float32", None)
    assert (wide.weight_bytes, wide.value_bytes) == (2 * FILES.weight_bytes, 4)
    narrow = demand(FILES, SHAPE, "bfloat16", "fp8_e5m2")
    assert (narrow.weight_bytes, narrow.value_bytes) == (FILES.weight_bytes, 1)


def test_quantised_weights_keep_their_bytes() -> None:
    quantised = Architecture("llama", "float16", "gptq", 8192, 32, 8, 32, 256)
    assert demand(FILES, quantised, "float32", None).weight_bytes == FILES.weight_bytes


def test_a_cpu_has_a_round_cache_that_can_be_filled() -> None:
    small = ModelFiles("small", {}, 10**9)
    needs = demand(small, SHAPE, "bfloat16", None)
    assert needs.on_cpu(64 * 10**9, 10**9).kv_cache == CPU_KV_MOST
    few = needs.on_cpu(64 * 10**9, 1000).kv_cache
    assert few % CPU_KV_STEP == 0
    assert 0 <= few - 1000 * 131_072 < CPU_KV_STEP
    memory = int((small.weight_bytes + CPU_RESERVE + 100_000_000) / CPU_UTILIZATION) + 1
    assert needs.on_cpu(memory, 10**9).kv_cache == CPU_KV_STEP
    assert needs.on_cpu(2 * 10**9, 10**9).kv_cache == 0


def test_a_cache_of_a_given_size_replaces_what_is_left() -> None:
    sums = demand(FILES, SHAPE, "bfloat16", None).on_gpu(GPU, 0.9, 1)
    assert with_kv_cache(sums, 131_072 * 10).tokens == 10


@pytest.mark.parametrize(
    ("count", "text"), [(80 * 10**9, "80.0 GB"), (1_234_500_000_000, "1,234.5 GB"), (64 << 20, "67.1 MB")]
)
def test_bytes_are_shown_in_a_unit_that_fits(count: float, text: str) -> None:
    assert gb(count) == text
