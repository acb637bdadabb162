"""The shape of a model, read from its config.json; it determines the size of the KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.models.errors import ModelError

DEFAULT_CONTEXT = 2048
"""vLLM's context for a model without a stated limit, in tokens."""

DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Values of `layer_types` for layers with a KV cache; other layers keep a state of fixed size."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a language model.

    Attributes:
        model_type: Family of the model, such as "qwen2".
        dtype: Type of the weights: "bfloat16", "float16" or "float32".
        quantization: Quantisation method of the weights; None: not quantised.
        context: The model's limit for prompt and answer together, in tokens.
        attention_heads: Attention heads, which tensor parallelism divides.
        kv_heads: Heads with a KV cache; 1: devices have a full copy each, as of a compressed vector (MLA).
        kv_layers: Layers with a KV cache.
        kv_width: Values that a head of a layer keeps per token.
        sliding_window: Tokens that some layers attend to; None: all layers attend to the whole context.
        multimodal: Whether the model also takes images or sound.
    """

    model_type: str
    dtype: str
    quantization: str | None
    context: int
    attention_heads: int
    kv_heads: int
    kv_layers: int
    kv_width: int
    sliding_window: int | None = None
    multimodal: bool = False

    def kv_bytes_per_token(self, value_bytes: float, devices: int = 1) -> int:
        """Return the bytes of KV cache that a token takes on each device.

        Args:
            value_bytes: Bytes of a value.
            devices: Devices that share the model. Each device has at least one head.
        """
        heads = max(1, self.kv_heads // devices)
        return int(self.kv_layers * heads * self.kv_width * value_bytes)


def read_architecture(config: Mapping[str, Any], source: str) -> Architecture:
    """Return the shape of a model from its config.json.

    Args:
        config: Content of config.json.
        source: The model, for messages.

    Raises:
        ModelError: A field that the memory sums need is missing.
    """
    text = config.get("text_config") or config.get("llm_config") or config.get("language_config") or config
    if not isinstance(text, Mapping):
        text = config
    fields = _Fields({**config, **text}, source)
    heads = fields.count("num_attention_heads", "n_head", "num_heads")
    layers = fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if fields.optional("kv_lora_rank") is not None:
        # One compressed vector per token (MLA).
        kv_heads = 1
        kv_width = fields.count("kv_lora_rank") + (fields.optional("qk_rope_head_dim") or 0)
    else:
        kv_heads = fields.optional("num_key_value_heads", "num_kv_heads", "n_head_kv") or (
            1 if fields.values.get("multi_query") else heads
        )
        head_dim = fields.optional("head_dim") or fields.count("hidden_size", "n_embd", "d_model") // heads
        # A key and a value.
        kv_width = 2 * head_dim
    quantization = config.get("quantization_config") or text.get("quantization_config")
    return Architecture(
        model_type=str(config.get("model_type", "")),
        dtype=_dtype(config, text),
        quantization=str(quantization.get("quant_method")) if isinstance(quantization, Mapping) else None,
        context=fields.optional(
            "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"
        )
        or DEFAULT_CONTEXT,
        attention_heads=heads,
        kv_heads=kv_heads,
        kv_layers=_kv_layers(fields, layers),
        kv_width=kv_width,
        sliding_window=_window(fields),
        multimodal=text is not config or "vision_config" in config or "audio_config" in config,
    )


class _Fields:
    """Numbers of a config.json; a number may have several names.

    Args:
        values: Content of config.json, merged with its section on text.
        source: The model, for messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self._source = source

    def optional(self, *names: str) -> int | None:
        """Return the first of some fields whose value is a number above 0; None if there is none."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def count(self, *names: str) -> int:
        """Return the first of some fields whose value is a number above 0.

        Raises:
            ModelError: No field has such a value.
        """
        value = self.optional(*names)
        if value is None:
            raise ModelError(
                f"config.json of {self._source} has no {names[0]}, so its memory can't be worked out; write "
                "a config of your own for it (the page Configs)"
            )
        return value


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the type of the weights, from the current or the older field."""
    for fields in (config, text):
        for name in ("dtype", "torch_dtype"):
            value = str(fields.get(name, "")).removeprefix("torch.")
            if value in DTYPE_BYTES:
                return value
    # Old configs lack the field; vLLM would convert float32 as well.
    return "bfloat16"


def _kv_layers(fields: _Fields, layers: int) -> int:
    """Return the number of layers with a KV cache: all layers, except in hybrid models."""
    types = fields.values.get("layer_types")
    if isinstance(types, list) and ATTENTION.intersection(map(str, types)):
        return sum(str(kind) in ATTENTION for kind in types)
    interval = fields.optional("full_attention_interval")
    return -(-layers // interval) if interval else layers


def _window(fields: _Fields) -> int | None:
    # Qwen2 has the field but doesn't use it.
    if fields.values.get("use_sliding_window") is False:
        return None
    return fields.optional("sliding_window")
