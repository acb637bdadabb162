"""The shape of models, from their config.json: the memory of a token, the context and what else is told."""

from typing import Any

import pytest

from serve_app.models.devices import UsableGPU
from serve_app.models.errors import ModelError
from tests.serve_app.models.doubles import GB, LLAMA_8B, LLAMA_70B, QWEN_7B, Model, Served, machine, served

ROOMY = UsableGPU("GPU", 1000 * GB, capability=9.0)
"""A GPU on which each model has its own context."""

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "max_position_embeddings": 163_840,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 34,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16},
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
FALCON = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
QWEN3_NEXT = QWEN_7B | {"num_hidden_layers": 48, "full_attention_interval": 4, "head_dim": 256}


def shaped(config: dict[str, Any], gpus: int = 1, **options: Any) -> Served:
    """Return the service of a small model with this config.json."""
    return served(Model("org/model", config, GB), machine(*[ROOMY] * gpus), **options)


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        (QWEN_7B, 28 * 4 * 128 * 2 * 2),
        (LLAMA_8B, 32 * 8 * 128 * 2 * 2),
        (LLAMA_70B, 80 * 8 * 128 * 2 * 2),
        (DEEPSEEK_V3, 61 * 576 * 2),
        (GEMMA_3_4B, 34 * 4 * 256 * 2 * 2),
        (GPT2, 12 * 12 * 64 * 2 * 2),
        (FALCON | {"multi_query": True}, 32 * 1 * 64 * 2 * 2),
        (QWEN3_NEXT, 12 * 4 * 256 * 2 * 2),
        (QWEN_7B | {"layer_types": ["linear_attention"] * 21 + ["full_attention"] * 7}, 7 * 4 * 128 * 2 * 2),
        (QWEN_7B | {"layer_types": ["sliding_attention", "full_attention"] * 14}, 28 * 4 * 128 * 2 * 2),
    ],
    ids=["gqa", "8b", "70b", "mla", "nested", "old names", "multi query", "interval", "mixed", "sliding"],
)
def test_a_token_takes_a_key_and_a_value_of_each_head(config: dict[str, Any], per_token: int) -> None:
    assert shaped(config).per_token == per_token


@pytest.mark.parametrize(
    ("config", "devices", "share"),
    [(LLAMA_70B, 4, 4), (LLAMA_70B, 16, 8), (QWEN_7B, 8, 4), (DEEPSEEK_V3, 8, 1)],
    ids=["heads are shared", "one each at least", "gqa of 4", "mla is whole on each"],
)
def test_devices_share_the_heads(config: dict[str, Any], devices: int, share: int) -> None:
    whole, part = shaped(config), shaped(config, devices, tensor_parallel_size=devices)
    assert part.per_token * share == whole.per_token


def test_stages_share_the_layers() -> None:
    whole, part = shaped(LLAMA_8B), shaped(LLAMA_8B, 8, tensor_parallel_size=2, pipeline_parallel_size=4)
    assert part.per_token * 8 == whole.per_token


@pytest.mark.parametrize(
    ("config", "kind", "context", "notes"),
    [
        (QWEN_7B, "qwen2", 32_768, []),
        (QWEN_7B | {"use_sliding_window": True}, "qwen2", 32_768, ["Some layers attend to 131,072 tokens"]),
        (
            GEMMA_3_4B,
            "gemma3",
            131_072,
            ["The model also takes images", "Some layers attend to 1,024 tokens"],
        ),
        (DEEPSEEK_V3, "deepseek_v3", 163_840, []),
        (FALCON, "falcon", 2048, []),
    ],
    ids=["window not used", "window", "images", "quantised", "no context"],
)
def test_the_family_the_context_and_what_else_matters_are_told(
    config: dict[str, Any], kind: str, context: int, notes: list[str]
) -> None:
    found = shaped(config)
    assert f": {kind}, 1.0 GB of weights" in found.line("model")
    assert ("(fp8)" in found.line("model")) == (config is DEEPSEEK_V3)
    assert found.line("context").startswith(f"max_model_len {context:,}: the model's own limit; ")
    assert len(found.notes) == len(notes)
    assert all(note.startswith(begin) for note, begin in zip(found.notes, notes, strict=True))


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": "float8_e4m3fn"}, "bfloat16"),
    ],
)
def test_the_type_of_the_weights(fields: dict[str, Any], dtype: str) -> None:
    # A CPU runs a model in that type.
    assert served(Model("org/model", QWEN_7B | fields, GB), machine()).engine["dtype"] == dtype


@pytest.mark.parametrize("value", [None, 0, "12", True, 1.5])
def test_a_config_without_what_the_sums_need_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json of org/model has no num_hidden_layers"):
        shaped(QWEN_7B | {"num_hidden_layers": value})
