"""The settings that are chosen for a model and a machine: what fits, what is spread, and what is refused.

The memory of a device holds the weights, a reserve and the KV cache.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.models.devices import Machine, UsableGPU
from serve_app.models.errors import ModelError
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from tests.serve_app.models.doubles import (
    BIG_LLAMA,
    GB,
    H100,
    HUGE_LLAMA,
    L4,
    LLAMA,
    LLAMA_8B,
    LLAMA_70B,
    MIB,
    QWEN,
    QWEN_7B,
    QWEN_7B_BYTES,
    T4,
    Model,
    Served,
    machine,
    served,
)

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = Model("Qwen/Qwen2.5-0.5B-Instruct", QWEN_7B | {"num_hidden_layers": 4}, GB)

RESERVE = 2_500_000_000
"""Bytes of a GPU beside weights and KV cache, as the summary tells them: 2.5 GB."""


def spread(found: Served) -> tuple[int, int]:
    """Return the GPUs that share a model, and its copies."""
    return found.parallel, found.replicas


@pytest.mark.parametrize(
    ("model", "gpus", "expected"),
    [
        (QWEN, [L4], (1, 1)),
        (QWEN, [L4] * 3, (1, 3)),
        (LLAMA, [H100] * 2, (1, 2)),
        (BIG_LLAMA, [H100] * 4, (4, 1)),
        (BIG_LLAMA, [H100] * 8, (4, 2)),
        # Two hold the weights and a little more, which is what there is.
        (BIG_LLAMA, [H100] * 2, (2, 1)),
    ],
)
def test_gpus_share_a_model_only_if_one_is_too_small(
    model: Model, gpus: list[UsableGPU], expected: tuple[int, int]
) -> None:
    assert spread(served(model, machine(*gpus))) == expected


def test_gpus_that_are_left_over_are_told() -> None:
    found = served(BIG_LLAMA, machine(*[H100] * 7))
    assert spread(found) == (4, 1)
    assert "3 of 7 GPUs stay idle: a replica takes 4." in found.notes


@pytest.mark.parametrize(
    ("model", "nodes", "given", "expected"),
    [
        # Nodes, stages, GPUs of a stage, replicas.
        (BIG_LLAMA, 4, {}, (1, 1, 4, 2)),
        (HUGE_LLAMA, 2, {}, (2, 2, 8, 1)),
        (HUGE_LLAMA, 5, {}, (2, 2, 8, 2)),
        (HUGE_LLAMA, 5, {"pipeline_parallel_size": 4}, (2, 4, 4, 2)),
        (BIG_LLAMA, 2, {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, (2, 2, 8, 1)),
    ],
)
def test_machines_share_a_model_only_if_one_is_too_small(
    model: Model, nodes: int, given: dict[str, Any], expected: tuple[int, ...]
) -> None:
    found = served(model, machine(*[H100] * 8, nodes=nodes), **given)
    assert (found.model.nodes, found.stages, found.parallel, found.replicas) == expected


def test_a_model_for_several_machines_is_refused_on_one() -> None:
    with pytest.raises(ModelError, match=r"16 such GPUs, on machines of one Ray cluster \(RAY_ADDRESS\)"):
        served(HUGE_LLAMA, machine(*[H100] * 8))
    with pytest.raises(ModelError, match="num_replicas 2: a replica takes 16 of 24 GPUs, so 1 is the most"):
        served(HUGE_LLAMA, machine(*[H100] * 8, nodes=3), 2)


def test_the_config_for_two_machines_agrees_with_the_sums() -> None:
    text = (CONFIGS / "llama3-405b-16xh100.yaml").read_text()
    (model,) = parse(yaml.safe_load(text)["applications"][0]["args"]).models
    assert isinstance(model, LLMSettings)
    found = served(HUGE_LLAMA, machine(*[H100] * 8, nodes=2), **model.engine.options())
    assert (found.model.nodes, found.model.processes) == (model.nodes, model.processes)
    assert found.notes == []
    weights, cache = HUGE_LLAMA.weight_bytes / 16, found.tokens * found.per_token
    assert f"are {weights / GB:.0f} GB on each" in text
    assert f"{cache / GB:.0f} GB of a GPU, {16 * cache / GB:.0f} GB in all" in text
    assert f"{found.tokens // 10_000 * 10_000:,} tokens at {16 * found.per_token / 1e6:.2f} MB" in text
    # Five requests of the model's own context.
    assert found.tokens // HUGE_LLAMA.config["max_position_embeddings"] == 5


def test_the_context_is_the_models_own_if_four_requests_fit() -> None:
    found = served(QWEN, machine(H100))
    assert found.engine["max_model_len"] == 32_768
    assert found.tokens >= 4 * 32_768


def test_else_the_context_is_the_longest_of_which_four_fit() -> None:
    found = served(QWEN, machine(L4))
    length = found.engine["max_model_len"]
    assert length % 1024 == 0
    assert length * 4 <= found.tokens < (length + 1024) * 4


def test_the_cache_has_what_weights_and_reserve_leave() -> None:
    cache = int(22_563 * MIB * 0.9) - QWEN_7B_BYTES - RESERVE
    assert served(QWEN, machine(L4)).tokens == cache // 57_344
    shared = served(QWEN, machine(L4, L4), tensor_parallel_size=2)
    assert shared.tokens == (cache + QWEN_7B_BYTES // 2) // (57_344 // 2)


def test_slices_of_gpus_hold_a_model_alone() -> None:
    part = replace(H100, memory=H100.memory // 4, is_slice=True)
    assert spread(served(QWEN, machine(part, part))) == (1, 2)
    assert "What would fit: a quantised variant" in refusal(
        LLAMA, machine(*[replace(part, memory=16 * GB)] * 2)
    )


# A model that doesn't fit


def refusal(model: Model, on: Machine, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        served(model, on, **options)
    return str(caught.value)


def test_a_model_that_does_not_fit_is_refused_with_the_sums() -> None:
    said = refusal(BIG_LLAMA, machine(L4))
    assert "doesn't fit one NVIDIA L4: it needs 146.3 GB, and 21.3 GB may be used (90% of 23.7 GB)" in said
    assert "weights   141.1 GB" in said
    assert "KV cache  2.7 GB for 8,192 tokens, 327,680 bytes each" in said
    assert (
        "What would fit: 8 such GPUs; a quantised variant of the model (FP8: about 70.6 GB of weights" in said
    )


def test_what_would_do_would_do() -> None:
    with pytest.raises(ModelError, match=r"doesn't fit 4 x NVIDIA L4: it needs .* of each"):
        served(BIG_LLAMA, machine(*[L4] * 4))
    assert spread(served(BIG_LLAMA, machine(*[L4] * 8))) == (8, 1)


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    said = refusal(LLAMA, machine(L4), max_model_len=131_072)
    assert "17.2 GB for one request of 131,072 tokens" in said
    context = int(said.partition("--max-model-len ")[2].partition(";")[0])
    assert served(LLAMA, machine(L4), max_model_len=context).engine["max_model_len"] == context
    refusal(LLAMA, machine(L4), max_model_len=context + 1024)


def test_no_context_is_advised_where_the_weights_do_not_fit() -> None:
    assert "--max-model-len" not in refusal(BIG_LLAMA, machine(L4), max_model_len=4096)


def test_a_quantised_model_is_not_told_to_be_quantised() -> None:
    model = replace(BIG_LLAMA, config=LLAMA_70B | {"quantization_config": {"quant_method": "fp8"}})
    assert "quantised" not in refusal(model, machine(L4))


def test_memory_of_other_programs_is_left_to_them() -> None:
    busy = replace(L4, used=3 * 1024 * MIB)
    found = served(SMALL, machine(busy))
    assert found.engine["gpu_memory_utilization"] == 0.84
    assert found.notes == ["Other programs use 3.2 GB of a GPU, so vLLM gets 84% of its memory."]
    full = replace(L4, used=L4.memory - MIB)
    assert "1% of 23.7 GB" in refusal(SMALL, machine(full))


def test_the_smallest_gpu_counts() -> None:
    found = served(QWEN, machine(H100, L4))
    assert found.tokens == served(QWEN, machine(L4)).tokens
    assert "The GPUs differ; the sums are for the smallest GPU, NVIDIA L4." in found.notes


# Values of the user


@pytest.mark.parametrize(
    ("options", "gpus", "replicas"),
    [
        ({"max_model_len": 4096}, 1, 2),
        ({"gpu_memory_utilization": 0.8}, 1, 2),
        ({"dtype": "half"}, 1, 2),
        ({"tensor_parallel_size": 2}, 2, 1),
        ({"pipeline_parallel_size": 2}, 2, 1),
    ],
)
def test_what_the_user_sets_is_kept(options: dict[str, Any], gpus: int, replicas: int) -> None:
    found = served(QWEN, machine(H100, H100), **options)
    assert found.engine.items() >= options.items()
    assert (found.gpus, found.replicas) == (gpus, replicas)


def test_more_gpus_than_there_are_are_refused() -> None:
    assert "needs 4 GPUs, and there are 2" in refusal(QWEN, machine(L4, L4), tensor_parallel_size=4)
    with pytest.raises(ModelError, match=r"num_replicas 3: a replica takes 1 of 2 GPUs, so 2 is the most"):
        served(QWEN, machine(L4, L4), 3)


def test_the_users_number_of_replicas_leaves_gpus_idle() -> None:
    found = served(QWEN, machine(*[L4] * 4), 2)
    assert found.replicas == 2
    assert found.notes == ["2 of 4 GPUs stay idle: a replica takes 1."]


def test_the_users_kv_cache_counts() -> None:
    found = served(QWEN, machine(L4), kv_cache_memory_bytes=GB)
    assert found.tokens == GB // 57_344
    assert found.engine["max_model_len"] == 4096


def test_a_kv_cache_of_bytes_holds_twice_the_tokens() -> None:
    whole, half = served(QWEN, machine(L4)), served(QWEN, machine(L4), kv_cache_dtype="fp8_e5m2")
    assert half.per_token * 2 == whole.per_token
    assert half.tokens in (2 * whole.tokens, 2 * whole.tokens + 1)


def test_a_context_above_the_models_own_is_told() -> None:
    found = served(QWEN, machine(H100), max_model_len=65_536)
    assert "vLLM refuses a longer context" in found.notes[0]


# Types


@pytest.mark.parametrize(
    ("fields", "gpu", "dtype"),
    [
        ({}, L4, "bfloat16"),
        ({}, T4, "float16"),
        ({"torch_dtype": "float16"}, L4, "float16"),
        ({"torch_dtype": "float32"}, L4, "bfloat16"),
        ({"model_type": "gemma2"}, T4, "float32"),
        ({"quantization_config": {"quant_method": "awq"}}, L4, "auto"),
        ({"torch_dtype": "float32"}, None, "float32"),
        ({}, None, "bfloat16"),
    ],
)
def test_the_type_is_one_that_the_device_has(
    fields: dict[str, Any], gpu: UsableGPU | None, dtype: str
) -> None:
    model = replace(SMALL, config={**SMALL.config, **fields})
    assert served(model, machine(*([gpu] if gpu else []))).engine["dtype"] == dtype


def test_the_type_changes_the_bytes_of_weights_and_cache() -> None:
    twice = replace(QWEN, config=QWEN_7B | {"torch_dtype": "float32"}, weight_bytes=2 * QWEN_7B_BYTES)
    assert served(twice, machine(L4)).tokens == served(QWEN, machine(L4)).tokens
    wide = served(twice, machine(H100), dtype="float32")
    assert "weights 30.5 GB" in wide.line("memory")
    assert wide.per_token == 2 * 57_344


def test_quantised_weights_keep_their_bytes() -> None:
    model = replace(QWEN, config=QWEN_7B | {"quantization_config": {"quant_method": "gptq"}})
    assert "weights 15.2 GB" in served(model, machine(H100), dtype="float32").line("memory")


# The CPU


def test_without_a_gpu_the_cpu_is_used() -> None:
    found = served(QWEN, machine(memory=64 * GB))
    assert (found.gpus, found.replicas) == (0, 1)
    assert "gpu_memory_utilization" not in found.engine
    # More than this would never be filled.
    assert found.engine["kv_cache_memory_bytes"] == 4 << 30


def test_a_cpu_keeps_no_more_memory_than_its_sequences_fill() -> None:
    tiny = Model("org/tiny", QWEN_7B | {"num_hidden_layers": 1, "max_position_embeddings": 1000}, GB)
    found = served(tiny, machine(memory=64 * GB))
    assert 128 * 1000 <= found.tokens < 128 * 1000 + (64 << 20) // 2048
    few = served(tiny, machine(memory=64 * GB), max_num_seqs=2)
    assert few.engine["kv_cache_memory_bytes"] == 64 << 20


@pytest.mark.parametrize(("spare", "cache"), [(100_000_000, 64 << 20), (200_000_000, 128 << 20)])
def test_a_small_host_has_a_round_cache(spare: int, cache: int) -> None:
    tiny = Model("org/tiny", QWEN_7B | {"num_hidden_layers": 1}, GB)
    # 80% of the memory, without the weights and 2 GB for the engine.
    found = served(tiny, machine(memory=int((GB + 2 * GB + spare) / 0.8) + 1))
    assert found.engine["kv_cache_memory_bytes"] == cache


def test_a_model_that_does_not_fit_the_host_is_refused() -> None:
    said = refusal(QWEN, machine(memory=16 * GB))
    assert "doesn't fit the memory of this machine: it needs 17.7 GB, and 12.8 GB may be used" in said


# Any machine


gpus = st.builds(
    UsableGPU, st.just("GPU"), st.integers(1, 200).map(lambda gb: gb * GB), capability=st.just(9.0)
)


@given(
    st.lists(gpus, max_size=9).map(tuple),
    st.integers(1, 256),
    st.integers(1, 400),
    st.sampled_from([QWEN_7B, LLAMA_8B, LLAMA_70B]),
)
def test_a_choice_stays_within_the_machine(
    found: tuple[UsableGPU, ...], host: int, weights: int, config: dict[str, Any]
) -> None:
    on = Machine(found, 8, host * GB)
    try:
        chosen = served(Model("org/model", config, weights * GB), on)
    except ModelError:
        return
    length = chosen.engine["max_model_len"]
    assert chosen.gpus * chosen.replicas <= len(found)
    assert (chosen.gpus == 0) == (not found)
    usable = 0.9 * min(gpu.memory for gpu in found) - RESERVE if found else 0.8 * host * GB - 2 * GB
    assert weights * GB / max(chosen.gpus, 1) + chosen.tokens * chosen.per_token <= usable
    assert 2048 <= length <= config["max_position_embeddings"]
    assert 4 * length <= chosen.tokens
