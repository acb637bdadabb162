"""The shape of models, from their config.json."""

from typing import Any

import pytest

from serve_app.models.architecture import read_architecture
from serve_app.models.errors import ModelError
from tests.serve_app.models.doubles import LLAMA_8B, LLAMA_70B, QWEN_7B

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
    assert read_architecture(config, "model").kv_bytes_per_token(2) == per_token


@pytest.mark.parametrize(
    ("config", "devices", "share"),
    [(LLAMA_70B, 4, 4), (LLAMA_70B, 16, 8), (QWEN_7B, 8, 4), (DEEPSEEK_V3, 8, 1)],
    ids=["heads are shared", "one each at least", "gqa of 4", "mla is whole on each"],
)
def test_devices_share_the_heads(config: dict[str, Any], devices: int, share: int) -> None:
    architecture = read_architecture(config, "model")
    assert architecture.kv_bytes_per_token(2, devices) * share == architecture.kv_bytes_per_token(2)


def test_the_fields_of_a_model() -> None:
    qwen = read_architecture(QWEN_7B, "model")
    assert (qwen.model_type, qwen.dtype) == ("qwen2", "bfloat16")
    assert (qwen.context, qwen.sliding_window, qwen.multimodal) == (32_768, None, False)
    gemma = read_architecture(GEMMA_3_4B, "model")
    assert (gemma.model_type, gemma.context, gemma.sliding_window) == ("gemma3", 131_072, 1024)
    assert gemma.multimodal
    assert read_architecture(DEEPSEEK_V3, "model").quantization == "fp8"
    assert read_architecture(FALCON, "model").context == 2048


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": "float8_e4m3fn"}, "bfloat16"),
    ],
)
def test_the_type_of_the_weights(fields: dict[str, Any], dtype: str) -> None:
    assert read_architecture(QWEN_7B | fields, "model").dtype == dtype


@pytest.mark.parametrize("value", [None, 0, "12", True, 1.5])
def test_a_config_without_what_the_sums_need_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match=r"config\.json of org/model has no num_hidden_layers"):
        read_architecture(QWEN_7B | {"num_hidden_layers": value}, "org/model")
