"""Choose the settings of an engine: type, context, sequences, devices and replicas."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.models.architecture import Architecture, read_architecture
from serve_app.models.devices import Machine, UsableGPU
from serve_app.models.errors import ModelError
from serve_app.models.families import Parsers, parsers_of
from serve_app.models.memory import UTILIZATION, MemoryDemand, MemorySums, demand, gb, with_kv_cache
from serve_app.models.model_files import ModelFiles

SEQUENCES = 4
"""Least number of full-length requests that fit at once; with fewer, one long request blocks the rest."""

GOOD_CONTEXT = 8192
"""A context that most uses need, in tokens. A replica gets GPUs until `SEQUENCES` such contexts fit."""

LEAST_CONTEXT = 2048
"""The smallest useful context, in tokens: a chat of some turns. A model with less room is refused."""

CONTEXT_STEP = 1024
"""A context below the model's own limit is a multiple of this, in tokens."""

BFLOAT16_FROM = 8.0
"""The lowest compute capability with bfloat16."""

NO_FLOAT16 = {"gemma2", "gemma3", "gemma3_text", "glm4"}
"""Families that vLLM refuses to run in float16, since their values exceed its range."""

CPU_SEQUENCES = 128
"""vLLM's default of `max_num_seqs` on a CPU: a KV cache for more sequences stays empty."""

USUAL_GPUS = 8
"""Maximum GPUs of a usual machine."""

MOST_DEVICES = 64
"""Maximum devices considered for the advice in a refusal."""


@dataclass(frozen=True)
class Choice:
    """The settings for a model on a machine.

    Attributes:
        files: The model's files.
        architecture: The model's shape.
        machine: The machine.
        parsers: Parsers of the model's family.
        sums: Memory sums of a device.
        dtype: Type that the engine computes in; "auto" for quantised weights.
        utilization: Share of a GPU's memory for vLLM; None: the CPU.
        max_model_len: Longest prompt and answer together, in tokens.
        tensor_parallel: GPUs that share the weights of a replica; 1 on the CPU.
        devices: GPUs of a replica; 0: the CPU.
        replicas: Copies of the model.
        stages: Pipeline stages of a replica, groups of GPUs with a part of the layers each.
        nodes: Machines of a replica.
        notes: Further notes for the user, each a sentence.
    """

    files: ModelFiles
    architecture: Architecture
    machine: Machine
    parsers: Parsers
    sums: MemorySums
    dtype: str
    utilization: float | None
    max_model_len: int
    tensor_parallel: int
    devices: int
    replicas: int
    stages: int = 1
    nodes: int = 1
    notes: tuple[str, ...] = ()


def choose(
    files: ModelFiles,
    machine: Machine,
    given: Mapping[str, Any],
    *,
    replicas: int | None = None,
) -> Choice:
    """Return the settings of an engine for a model on a machine.

    Args:
        files: The model.
        machine: The machine.
        given: Engine options set by the user, by their vLLM names; they are kept.
        replicas: Copies of the model, set by the user; None: as many as the GPUs allow.

    Raises:
        ModelError: The model doesn't fit; the message has the sums and alternatives.
    """
    architecture = read_architecture(files.config, files.source)
    notes = _notes(architecture, given)
    dtype = given.get("dtype") or _dtype(architecture, machine.gpus)
    runs_in = architecture.dtype if dtype == "auto" else dtype
    wanted = demand(files, architecture, runs_in, given.get("kv_cache_dtype"))
    stages, nodes = given.get("pipeline_parallel_size") or 1, 1
    if machine.gpus:
        gpu, utilization, more = _common(machine.gpus, given)
        notes += more
        nodes, stages, parallel, sums = _place(wanted, gpu, utilization, machine, given)
    else:
        gpu, utilization = None, None
        tokens = given.get("max_num_seqs", CPU_SEQUENCES) * given.get("max_model_len", architecture.context)
        parallel, sums = 1, _own_cache(wanted.on_cpu(machine.memory, tokens), given)
        if sums.tokens < _least_tokens(architecture, given):
            raise _refusal(wanted, sums, given, "the memory of this machine", "")
    context = given.get("max_model_len") or _context(architecture, sums.tokens)
    devices = parallel * stages if gpu else 0
    most = (machine.nodes // nodes if nodes > 1 else len(machine.gpus) // devices) if devices else 1
    if devices and replicas is not None and replicas > most:
        count = len(machine.gpus) * (machine.nodes if nodes > 1 else 1)
        raise ModelError(
            f"deployment.num_replicas {replicas}: a replica takes {devices} of {count} GPUs, so {most} is "
            "the most"
        )
    if devices and nodes == 1 and (idle := len(machine.gpus) - devices * (replicas or most)):
        notes.append(f"{idle} of {len(machine.gpus)} GPUs stay idle: a replica takes {devices}.")
    return Choice(
        files=files,
        architecture=architecture,
        machine=machine,
        parsers=parsers_of(architecture.model_type, files.source),
        sums=sums,
        dtype=dtype,
        utilization=utilization,
        max_model_len=context,
        tensor_parallel=parallel,
        devices=devices,
        replicas=replicas or most,
        stages=stages,
        nodes=nodes,
        notes=tuple(notes),
    )


def _notes(architecture: Architecture, given: Mapping[str, Any]) -> list[str]:
    notes = []
    if given.get("max_model_len", 0) > architecture.context:
        notes.append(
            f"The model's own limit is {architecture.context:,} tokens. vLLM refuses a longer context "
            "unless the model's config scales it (--hf-overrides)."
        )
    if architecture.multimodal:
        notes.append(
            "The model also takes images or sound; such requests are refused unless its config has "
            "multimodal: true. vLLM reserves memory for them, which the sums leave out; if memory is short, "
            "lower --max-model-len."
        )
    if architecture.sliding_window:
        notes.append(
            f"Some layers attend to {architecture.sliding_window:,} tokens only. The sums assume the whole "
            "context for all layers, so more requests fit than the sums show."
        )
    return notes


def _dtype(architecture: Architecture, gpus: Sequence[UsableGPU]) -> str:
    """Return the type to compute in: the type of the weights, unless unsupported or wasteful."""
    if architecture.quantization:
        return "auto"
    if not gpus:
        return architecture.dtype
    old = any(gpu.capability is not None and gpu.capability < BFLOAT16_FROM for gpu in gpus)
    if architecture.dtype == "float16" or not old:
        return "bfloat16" if architecture.dtype == "float32" else architecture.dtype
    return "float32" if architecture.model_type in NO_FLOAT16 else "float16"


def _common(gpus: Sequence[UsableGPU], given: Mapping[str, Any]) -> tuple[UsableGPU, float, list[str]]:
    """Return the smallest GPU, the share of GPU memory for vLLM, and notes."""
    notes = []
    least = min(gpus, key=lambda gpu: gpu.memory)
    if least.memory < 0.95 * max(gpu.memory for gpu in gpus):
        notes.append(f"The GPUs differ; the sums are for the smallest GPU, {least.name}.")
    free = min(1 - gpu.used / gpu.memory for gpu in gpus)
    if "gpu_memory_utilization" in given:
        return least, given["gpu_memory_utilization"], notes
    # vLLM refuses to start with less free memory than its share; some memory must stay free.
    utilization = min(UTILIZATION, max(0.01, math.floor(100 * (free - 0.02)) / 100))
    if utilization < UTILIZATION:
        used = max(gpu.used for gpu in gpus)
        notes.append(f"Other programs use {gb(used)} of a GPU, so vLLM gets {utilization:.0%} of its memory.")
    return least, utilization, notes


def _place(
    wanted: MemoryDemand, gpu: UsableGPU, utilization: float, machine: Machine, given: Mapping[str, Any]
) -> tuple[int, int, int, MemorySums]:
    """Return the fewest machines that hold the model, the stages, the GPUs of a stage, and the sums of a GPU.

    Each machine has stages of its own: the GPUs of a stage exchange too much for most networks.

    Raises:
        ModelError: All machines together are too small.
    """
    count, refusals = len(machine.gpus), []
    for nodes in range(1, machine.nodes + 1):
        stages = given.get("pipeline_parallel_size") or nodes
        try:
            parallel, sums = _spread(wanted, gpu, utilization, stages, count * nodes, given)
        except ModelError as error:
            refusals.append(error)
            continue
        return nodes, stages, parallel, sums
    raise refusals[-1]


def _spread(
    wanted: MemoryDemand,
    gpu: UsableGPU,
    utilization: float,
    stages: int,
    count: int,
    given: Mapping[str, Any],
) -> tuple[int, MemorySums]:
    """Return the smallest number of GPUs per pipeline stage that hold the model, and the sums of each GPU.

    Raises:
        ModelError: All GPUs together are too small.
    """
    fixed = given.get("tensor_parallel_size")
    if (fixed or 1) * stages > count:
        raise ModelError(
            f"engine.tensor_parallel_size {fixed or 1} with pipeline_parallel_size {stages} needs "
            f"{(fixed or 1) * stages} GPUs, and there are {count}"
        )
    # Slices of GPUs have no way to exchange data.
    numbers = [fixed] if fixed else _parallels(wanted.architecture, 1 if gpu.is_slice else count // stages)

    def sums_of(number: int) -> MemorySums:
        return _own_cache(wanted.on_gpu(gpu.memory, utilization, number, stages), given)

    for number in numbers:
        if (sums := sums_of(number)).tokens >= _good_tokens(wanted.architecture, given):
            return number, sums
    if sums.tokens >= _least_tokens(wanted.architecture, given):
        return number, sums
    enough = [
        number * stages
        for number in ([fixed] if fixed else _parallels(wanted.architecture, MOST_DEVICES))
        if sums_of(number).tokens >= _least_tokens(wanted.architecture, given)
    ]
    place = f"{number * stages} x {gpu.name}" if number * stages > 1 else f"one {gpu.name}"
    more = f"{enough[0]} such GPUs" if enough and not gpu.is_slice else ""
    if more and enough[0] > USUAL_GPUS:
        more += ", on machines of one Ray cluster (RAY_ADDRESS)"
    raise _refusal(wanted, sums, given, place, more)


def _parallels(architecture: Architecture, most: int) -> list[int]:
    """Return the numbers of GPUs that can share the attention heads."""
    powers = [1 << bits for bits in range(most.bit_length())]
    return [number for number in powers if number <= most and architecture.attention_heads % number == 0]


def _own_cache(sums: MemorySums, given: Mapping[str, Any]) -> MemorySums:
    """Return the sums with the user's KV cache size if it is set."""
    size = given.get("kv_cache_memory_bytes")
    return with_kv_cache(sums, size) if size else sums


def _least_tokens(architecture: Architecture, given: Mapping[str, Any]) -> int:
    """Return the smallest useful KV cache, in tokens."""
    if "max_model_len" in given:
        return int(given["max_model_len"])
    return SEQUENCES * min(LEAST_CONTEXT, architecture.context)


def _good_tokens(architecture: Architecture, given: Mapping[str, Any]) -> int:
    """Return the KV cache that is large enough not to add GPUs to a replica, in tokens."""
    length = min(GOOD_CONTEXT, int(given.get("max_model_len", architecture.context)))
    return max(SEQUENCES * length, _least_tokens(architecture, given))


def _refusal(
    wanted: MemoryDemand, sums: MemorySums, given: Mapping[str, Any], place: str, more: str
) -> ModelError:
    """Return the error for a KV cache that is too small, with the sums and alternatives.

    Args:
        wanted: Memory that the model needs.
        sums: The sums of a device.
        given: Engine options set by the user.
        place: The devices.
        more: Devices that would be enough; empty: unknown.
    """
    least = _least_tokens(wanted.architecture, given)
    kind = f"one request of {least:,} tokens" if "max_model_len" in given else f"{least:,} tokens"
    needed = sums.weights + sums.reserve + least * sums.per_token
    each = " of each" if " x " in place else ""
    advice = [more] if more else []
    longest = sums.tokens // CONTEXT_STEP * CONTEXT_STEP
    if "max_model_len" in given and longest:
        advice.append(f"--max-model-len {longest}")
    if wanted.architecture.quantization is None:
        advice.append(
            f"a quantised variant of the model (FP8: about {gb(wanted.weight_bytes / 2)} of weights, 4 bits: "
            f"about {gb(wanted.weight_bytes * 0.3)})"
        )
    advice.append("a smaller model")
    return ModelError(
        f"the model doesn't fit {place}: it needs {gb(needed)}{each}, and {gb(sums.usable)} may be used "
        f"({sums.usable / sums.device:.0%} of {gb(sums.device)})\n"
        f"  weights   {gb(sums.weights)}\n"
        f"  reserve   {gb(sums.reserve)} for activations and libraries\n"
        f"  KV cache  {gb(least * sums.per_token)} for {kind}, {sums.per_token:,} bytes each\n"
        f"What would fit: {'; '.join(advice)}"
    )


def _context(architecture: Architecture, tokens: int) -> int:
    """Return the longest context such that `SEQUENCES` requests fit, at most the model's own limit."""
    longest = tokens // SEQUENCES
    if longest >= architecture.context:
        return architecture.context
    return longest // CONTEXT_STEP * CONTEXT_STEP
