"""The settings that are chosen for a model and a machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.models.choose import CONTEXT_STEP, LEAST_CONTEXT, SEQUENCES, Choice, choose
from serve_app.models.devices import Machine, UsableGPU
from serve_app.models.errors import ModelError
from serve_app.models.memory import CPU_KV_MOST
from serve_app.models.model_files import ModelFiles
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
    machine,
)

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = ModelFiles("Qwen/Qwen2.5-0.5B-Instruct", QWEN_7B | {"num_hidden_layers": 4}, GB)


def spread(choice: Choice) -> tuple[int, int]:
    return choice.tensor_parallel, choice.replicas


@pytest.mark.parametrize(
    ("files", "gpus", "expected"),
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
    files: ModelFiles, gpus: list[UsableGPU], expected: tuple[int, int]
) -> None:
    assert spread(choose(files, machine(*gpus), {})) == expected


def test_gpus_that_are_left_over_are_told() -> None:
    choice = choose(BIG_LLAMA, machine(*[H100] * 7), {})
    assert spread(choice) == (4, 1)
    assert "3 of 7 GPUs stay idle: a replica takes 4." in choice.notes


@pytest.mark.parametrize(
    ("files", "nodes", "given", "expected"),
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
    files: ModelFiles, nodes: int, given: dict[str, Any], expected: tuple[int, ...]
) -> None:
    choice = choose(files, machine(*[H100] * 8, nodes=nodes), given)
    assert (choice.nodes, choice.stages, choice.tensor_parallel, choice.replicas) == expected
    assert choice.devices == choice.stages * choice.tensor_parallel


def test_a_model_for_several_machines_is_refused_on_one() -> None:
    with pytest.raises(ModelError, match=r"16 such GPUs, on machines of one Ray cluster \(RAY_ADDRESS\)"):
        choose(HUGE_LLAMA, machine(*[H100] * 8), {})
    with pytest.raises(ModelError, match="num_replicas 2: a replica takes 16 of 24 GPUs, so 1 is the most"):
        choose(HUGE_LLAMA, machine(*[H100] * 8, nodes=3), {}, replicas=2)


def test_the_config_for_two_machines_agrees_with_the_sums() -> None:
    text = (CONFIGS / "llama3-405b-16xh100.yaml").read_text()
    (model,) = parse(yaml.safe_load(text)["applications"][0]["args"]).models
    assert isinstance(model, LLMSettings)
    choice = choose(HUGE_LLAMA, machine(*[H100] * 8, nodes=2), model.engine.options())
    assert (choice.nodes, choice.devices) == (model.nodes, model.processes)
    assert choice.notes == ()
    sums = choice.sums
    assert f"are {sums.weights / GB:.0f} GB on each" in text
    assert f"{sums.kv_cache / GB:.0f} GB of a GPU, {16 * sums.kv_cache / GB:.0f} GB in all" in text
    assert f"{sums.tokens // 10_000 * 10_000:,} tokens at {16 * sums.per_token / 1e6:.2f} MB" in text
    # Five requests of the model's own context.
    assert sums.tokens // choice.architecture.context == 5


def test_the_context_is_the_models_own_if_several_fit() -> None:
    choice = choose(QWEN, machine(H100), {})
    assert choice.max_model_len == 32_768
    assert choice.sums.tokens >= SEQUENCES * 32_768


def test_else_the_context_is_the_longest_of_which_several_fit() -> None:
    choice = choose(QWEN, machine(L4), {})
    assert choice.max_model_len % CONTEXT_STEP == 0
    assert choice.max_model_len * SEQUENCES <= choice.sums.tokens
    assert (choice.max_model_len + CONTEXT_STEP) * SEQUENCES > choice.sums.tokens


def test_the_sums_are_those_of_the_device() -> None:
    sums = choose(QWEN, machine(L4), {}).sums
    assert sums.device == 22_563 * MIB
    assert sums.usable == int(22_563 * MIB * 0.9)
    assert sums.weights == QWEN_7B_BYTES
    assert sums.usable == sums.weights + sums.reserve + sums.kv_cache
    assert sums.tokens == sums.kv_cache // 57_344


def test_slices_of_gpus_hold_a_model_alone() -> None:
    part = replace(H100, memory=H100.memory // 4, is_slice=True)
    assert spread(choose(QWEN, machine(part, part), {})) == (1, 2)
    assert "What would fit: a quantised variant" in refusal(
        LLAMA, machine(*[replace(part, memory=16 * GB)] * 2)
    )


# A model that doesn't fit


def refusal(files: ModelFiles, on: Machine, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        choose(files, on, options)
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
        choose(BIG_LLAMA, machine(*[L4] * 4), {})
    assert spread(choose(BIG_LLAMA, machine(*[L4] * 8), {})) == (8, 1)


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    said = refusal(LLAMA, machine(L4), max_model_len=131_072)
    assert "17.2 GB for one request of 131,072 tokens" in said
    context = int(said.partition("--max-model-len ")[2].partition(";")[0])
    assert choose(LLAMA, machine(L4), {"max_model_len": context}).max_model_len == context
    refusal(LLAMA, machine(L4), max_model_len=context + CONTEXT_STEP)


def test_a_quantised_model_is_not_told_to_be_quantised() -> None:
    files = replace(BIG_LLAMA, config=LLAMA_70B | {"quantization_config": {"quant_method": "fp8"}})
    assert "quantised" not in refusal(files, machine(L4))


def test_memory_of_other_programs_is_left_to_them() -> None:
    busy = replace(L4, used=3 * 1024 * MIB)
    choice = choose(SMALL, machine(busy), {})
    assert choice.utilization == 0.84
    assert choice.notes == ("Other programs use 3.2 GB of a GPU, so vLLM gets 84% of its memory.",)
    full = replace(L4, used=L4.memory - MIB)
    assert "1% of 23.7 GB" in refusal(SMALL, machine(full))


def test_the_smallest_gpu_counts() -> None:
    choice = choose(QWEN, machine(H100, L4), {})
    assert choice.sums.device == L4.memory
    assert "The GPUs differ; the sums are for the smallest GPU, NVIDIA L4." in choice.notes


# Values of the user


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"max_model_len": 4096}, {"max_model_len": 4096}),
        ({"gpu_memory_utilization": 0.8}, {"utilization": 0.8}),
        ({"dtype": "half"}, {"dtype": "half"}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel": 2, "replicas": 1, "devices": 2}),
        ({"pipeline_parallel_size": 2}, {"tensor_parallel": 1, "replicas": 1, "devices": 2}),
    ],
)
def test_what_the_user_sets_is_kept(options: dict[str, Any], fields: dict[str, Any]) -> None:
    choice = choose(QWEN, machine(H100, H100), options)
    assert {name: getattr(choice, name) for name in fields} == fields


def test_more_gpus_than_there_are_are_refused() -> None:
    assert "needs 4 GPUs, and there are 2" in refusal(QWEN, machine(L4, L4), tensor_parallel_size=4)
    with pytest.raises(ModelError, match=r"num_replicas 3: a replica takes 1 of 2 GPUs, so 2 is the most"):
        choose(QWEN, machine(L4, L4), {}, replicas=3)


def test_the_users_number_of_replicas_leaves_gpus_idle() -> None:
    choice = choose(QWEN, machine(*[L4] * 4), {}, replicas=2)
    assert choice.replicas == 2
    assert choice.notes == ("2 of 4 GPUs stay idle: a replica takes 1.",)


def test_the_users_kv_cache_counts() -> None:
    choice = choose(QWEN, machine(L4), {"kv_cache_memory_bytes": GB})
    assert choice.sums.kv_cache == GB
    assert choice.max_model_len == 4096


def test_a_kv_cache_of_bytes_holds_twice_the_tokens() -> None:
    whole, half = choose(QWEN, machine(L4), {}), choose(QWEN, machine(L4), {"kv_cache_dtype": "fp8"})
    assert half.sums.tokens in (2 * whole.sums.tokens, 2 * whole.sums.tokens + 1)


def test_a_context_above_the_models_own_is_told() -> None:
    choice = choose(QWEN, machine(H100), {"max_model_len": 65_536})
    assert "vLLM refuses a longer context" in choice.notes[0]


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
    files = replace(SMALL, config={**SMALL.config, **fields})
    assert choose(files, machine(*([gpu] if gpu else [])), {}).dtype == dtype


def test_weights_in_float32_take_half_of_their_files() -> None:
    files = replace(QWEN, config=QWEN_7B | {"torch_dtype": "float32"}, weight_bytes=30 * GB)
    assert choose(files, machine(L4), {}).sums.weights == 15 * GB


# The CPU


def test_without_a_gpu_the_cpu_is_used() -> None:
    choice = choose(QWEN, machine(memory=64 * GB), {})
    assert (choice.devices, choice.replicas, choice.utilization) == (0, 1, None)
    assert choice.sums.kv_cache == CPU_KV_MOST


def test_a_cpu_keeps_no_more_memory_than_its_sequences_fill() -> None:
    tiny = ModelFiles("org/tiny", QWEN_7B | {"num_hidden_layers": 1, "max_position_embeddings": 1000}, GB)
    sums = choose(tiny, machine(memory=64 * GB), {}).sums
    assert 128 * 1000 <= sums.tokens < 128 * 1000 + (64 << 20) // 2048
    assert choose(tiny, machine(memory=64 * GB), {"max_num_seqs": 2}).sums.kv_cache == 64 << 20


def test_a_model_that_does_not_fit_the_host_is_refused() -> None:
    said = refusal(QWEN, machine(memory=16 * GB))
    assert "doesn't fit the memory of this machine: it needs 17.7 GB, and 12.8 GB may be used" in said


# Notes


def test_a_sliding_window_is_told() -> None:
    files = replace(QWEN, config=QWEN_7B | {"sliding_window": 4096, "use_sliding_window": True})
    assert choose(files, machine(H100), {}).notes[0].startswith("Some layers attend to 4,096 tokens only.")


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
        choice = choose(ModelFiles("org/model", config, weights * GB), on, {})
    except ModelError:
        return
    sums = choice.sums
    assert choice.devices * choice.replicas <= len(found)
    assert (choice.devices == 0) == (not found)
    assert sums.weights + sums.reserve + sums.kv_cache <= sums.usable <= sums.device
    assert sums.weights * max(choice.devices, 1) >= weights * GB
    assert LEAST_CONTEXT <= choice.max_model_len <= config["max_position_embeddings"]
    assert SEQUENCES * choice.max_model_len <= sums.tokens
