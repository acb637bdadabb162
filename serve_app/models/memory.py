"""Memory sums of a device: the bytes left for the KV cache, and the number of tokens that fit."""

from dataclasses import dataclass, replace

from serve_app.models.architecture import DTYPE_BYTES, Architecture
from serve_app.models.model_files import ModelFiles

GB = 10**9

UTILIZATION = 0.9
"""Share of a GPU's memory for vLLM. The rest covers fragmentation, libraries and other programs."""

RESERVE = 2_500_000_000
"""Bytes of a GPU beside weights and KV cache, for models of 1 to 100 billion parameters.

1 GB: CUDA's context, the graphs that vLLM captures, and the buffers of collective calls. 1.5 GB: the
activations of a step of 8,192 tokens, and the logits of up to 1,024 sequences in float32. vLLM measures the
real number at its start. The KV cache has room for several full contexts, which absorbs the difference.
"""

CPU_UTILIZATION = 0.8
"""Share of the host's available memory for the engine. The rest is for Ray, HAProxy and the Ingress."""

CPU_RESERVE = 2_000_000_000
"""Bytes of the engine's process beside weights and KV cache: its libraries and the activations of a step."""

CPU_KV_MOST = 4 << 30
"""Maximum bytes of KV cache on a CPU: its cores are saturated long before a larger KV cache fills up."""

CPU_KV_STEP = 64 << 20
"""The bytes of KV cache on a CPU are a multiple of this, for a round number in the config."""


@dataclass(frozen=True)
class MemorySums:
    """Memory sums of a device, in bytes.

    Attributes:
        device: Bytes of the device.
        usable: Bytes that vLLM may use.
        weights: Bytes of the weights on this device.
        reserve: Bytes for everything else.
        kv_cache: Bytes left for the KV cache; 0 if the rest doesn't fit.
        per_token: Bytes that a token takes in the KV cache of this device.
    """

    device: int
    usable: int
    weights: int
    reserve: int
    kv_cache: int
    per_token: int

    @property
    def tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self.kv_cache // self.per_token


@dataclass(frozen=True)
class MemoryDemand:
    """Memory that a model needs, for any number of devices.

    Attributes:
        architecture: The model's shape.
        weight_bytes: Bytes of the loaded weights.
        value_bytes: Bytes of a value in the KV cache.
    """

    architecture: Architecture
    weight_bytes: int
    value_bytes: float

    def on_gpu(self, memory: int, utilization: float, parallel: int, stages: int = 1) -> MemorySums:
        """Return the sums of a GPU when several GPUs share the model.

        Args:
            memory: Bytes of a GPU.
            utilization: Share of a GPU's memory for vLLM.
            parallel: GPUs that share each layer.
            stages: Pipeline stages, groups of such GPUs with a part of the layers each.
        """
        usable = int(memory * utilization)
        weights = -(-self.weight_bytes // (parallel * stages))
        per_token = -(-self.architecture.kv_bytes_per_token(self.value_bytes, parallel) // stages)
        return MemorySums(memory, usable, weights, RESERVE, max(0, usable - weights - RESERVE), per_token)

    def on_cpu(self, memory: int, tokens: int) -> MemorySums:
        """Return the sums of a host.

        Args:
            memory: Available bytes.
            tokens: Maximum tokens that the KV cache can ever hold.
        """
        usable = int(memory * CPU_UTILIZATION)
        per_token = self.architecture.kv_bytes_per_token(self.value_bytes)
        most = min(CPU_KV_MOST, -(-tokens * per_token // CPU_KV_STEP) * CPU_KV_STEP)
        left = max(0, min(most, usable - self.weight_bytes - CPU_RESERVE))
        return MemorySums(
            memory, usable, self.weight_bytes, CPU_RESERVE, left - left % CPU_KV_STEP, per_token
        )


def with_kv_cache(sums: MemorySums, kv_cache: int) -> MemorySums:
    """Return sums with a KV cache of a given size in bytes, instead of all memory that is left."""
    return replace(sums, kv_cache=kv_cache)


def demand(files: ModelFiles, architecture: Architecture, dtype: str, kv_dtype: str | None) -> MemoryDemand:
    """Return the memory that a model needs.

    Args:
        files: The model's files.
        architecture: The model's shape.
        dtype: The type that the engine computes in.
        kv_dtype: vLLM's `kv_cache_dtype`; None: the same type.
    """
    weight_bytes = files.weight_bytes
    if architecture.quantization is None:
        weight_bytes = weight_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[architecture.dtype]
    value_bytes = 1 if kv_dtype and kv_dtype.startswith("fp8") else DTYPE_BYTES[dtype]
    return MemoryDemand(architecture, weight_bytes, value_bytes)


def gb(count: float) -> str:
    """Return a number of bytes as readable text, in GB or MB."""
    return f"{count / GB:,.1f} GB" if count >= GB / 10 else f"{count / 1e6:,.3g} MB"
