"""The service of a model with its chosen settings."""

import re

from serve_app.models.architecture import DTYPE_BYTES, Architecture
from serve_app.models.choose import BFLOAT16_FROM, GOOD_CONTEXT, SEQUENCES, Choice
from serve_app.models.memory import CPU_RESERVE, RESERVE, MemorySums, gb
from serve_app.models.service import ONE_PROCESS, ServiceParts
from serve_app.settings.models import EngineSettings
from serve_app.system.yaml_text import Noted, Section

ANSWER_TOKENS, REASONING_TOKENS = 512, 4096
"""Default of `max_tokens` for `/generate`, without and with reasoning before the answer."""

MOST_CORES = 4
"""Maximum cores of an engine on a GPU, for tokenizing, scheduling and streaming."""

MOST_INGRESS = 4
"""Maximum replicas of the Ingress."""


def service_id(source: str) -> str:
    """Return the name of a model for clients: the last part of its Hugging Face id or directory."""
    last = source.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", last).lstrip("._-")[:100] or "model"


def model_service(choice: Choice, id: str, head: str) -> ServiceParts:
    """Return the service of a model.

    Args:
        choice: The settings.
        id: Name of the model for clients.
        head: Comment at the top of the config.
    """
    ingress_cores = 1.0 if choice.devices and choice.machine.cores >= MOST_CORES else 0.5
    engine_cores = _engine_cores(choice, choice.machine.cores - ingress_cores)
    spare = choice.machine.cores - engine_cores * choice.replicas
    return ServiceParts(
        head=head,
        id=id,
        source=choice.files.source,
        engine=_engine(choice),
        sampling=_sampling(choice),
        folder=id,
        ingress=_ingress(ingress_cores, int(spare / ingress_cores) if choice.devices else 1),
        deployment=_deployment(choice, engine_cores),
        nodes=choice.nodes,
    )


def sums_line(sums: MemorySums) -> str:
    """Return the memory sums of a device as a line."""
    return (
        f"{gb(sums.usable)} of {gb(sums.device)} - weights {gb(sums.weights)} - reserve {gb(sums.reserve)} "
        f"leave {gb(sums.kv_cache)} of KV cache: {sums.tokens:,} tokens of {sums.per_token:,} bytes"
    )


def context_reason(architecture: Architecture, context: int, tokens: int) -> str:
    """Return the reason for the length of a context.

    Args:
        architecture: The model's shape.
        context: The context, in tokens.
        tokens: Tokens that fit into the KV cache.
    """
    fit = f"{tokens / context:.1f} requests of that length fit at once"
    if context == architecture.context:
        return f"the model's own limit; {fit}"
    if context < architecture.context:
        return f"{fit}; the model's own limit is {architecture.context:,}"
    return fit


def spread_reason(choice: Choice) -> str:
    """Return why a replica takes several machines, as a sentence."""
    fewer = len(choice.machine.gpus) * (choice.nodes - 1)
    return (
        f"{choice.devices} GPUs of {choice.nodes} machines hold the {gb(choice.files.weight_bytes)} of "
        f"weights; {fewer} GPUs have no room for them and for requests."
    )


def _engine(choice: Choice) -> Section:
    sums = choice.sums
    engine: Section = {"dtype": Noted(choice.dtype, _dtype_reason(choice))}
    if choice.utilization is not None:
        engine["gpu_memory_utilization"] = Noted(
            choice.utilization,
            f"{_about('gpu_memory_utilization')} Here: {sums_line(sums)}. The reserve of {gb(RESERVE)} is "
            "for activations and libraries; vLLM measures the real number at its start.",
        )
    engine["max_model_len"] = Noted(
        choice.max_model_len,
        f"{_about('max_model_len')} Here: "
        f"{context_reason(choice.architecture, choice.max_model_len, sums.tokens)}.",
    )
    if choice.utilization is None:
        engine |= _cpu(choice)
    if choice.tensor_parallel > 1:
        engine["tensor_parallel_size"] = Noted(
            choice.tensor_parallel,
            f"GPUs that share the weights, {gb(sums.weights)} each. Fewer GPUs have no room for the weights "
            f"and {SEQUENCES} requests of {GOOD_CONTEXT:,} tokens.",
        )
    if choice.nodes > 1:
        engine["pipeline_parallel_size"] = Noted(
            choice.stages,
            f"{_about('pipeline_parallel_size')} {spread_reason(choice)} A stage stays within a machine, "
            "since its GPUs exchange what they have computed in each layer.",
        )
    elif choice.devices > 1:
        engine["distributed_executor_backend"] = Noted(
            "mp", "The replica runs a process per GPU, all on its own machine."
        )
    return engine | _parsers(choice)


def _about(name: str) -> str:
    return EngineSettings.model_fields[name].description or ""


def _cpu(choice: Choice) -> Section:
    return {
        "kv_cache_memory_bytes": Noted(
            choice.sums.kv_cache,
            f"{_about('kv_cache_memory_bytes')} Here: {sums_line(choice.sums)}. The reserve of "
            f"{gb(CPU_RESERVE)} is for libraries and activations.",
        ),
        "enforce_eager": Noted(True, "No compilation, which takes minutes on a CPU."),
        "distributed_executor_backend": ONE_PROCESS,
    }


def _dtype_reason(choice: Choice) -> str:
    own, method = choice.architecture.dtype, choice.architecture.quantization
    if method:
        return f"Type of the values that are not quantised. The weights are quantised: {method}."
    if choice.dtype == own:
        return "Type of weights and KV cache: the type of the published weights."
    published = f"Type of weights and KV cache. The weights are published in {own}"
    if own == "float32" and DTYPE_BYTES.get(choice.dtype) == 2:
        return f"{published}, which takes twice the memory."
    old = any((gpu.capability or BFLOAT16_FROM) < BFLOAT16_FROM for gpu in choice.machine.gpus)
    if own == "bfloat16" and old:
        return f"{published}, which this GPU lacks."
    return f"{published}."


def _parsers(choice: Choice) -> Section:
    engine: Section = {}
    if choice.parsers.tools:
        engine["enable_auto_tool_choice"] = Noted(
            True,
            "Clients may offer tools. The parser has to match the format in which the model writes tool "
            "calls.",
        )
        engine["tool_call_parser"] = Noted(choice.parsers.tools)
    if choice.parsers.reasoning:
        engine["reasoning_parser"] = Noted(
            choice.parsers.reasoning,
            "The model reasons before it answers. The parser separates the reasoning from the answer, so "
            "that clients get it in another field.",
        )
    return engine


def _sampling(choice: Choice) -> Noted:
    tokens = REASONING_TOKENS if choice.parsers.reasoning else ANSWER_TOKENS
    return Noted(
        {
            "temperature": Noted(0.7),
            "max_tokens": Noted(min(tokens, max(1, choice.max_model_len // 2))),
        },
        "Defaults of /generate; the routes below /v1 use vLLM's defaults.",
    )


def _engine_cores(choice: Choice, spare: float) -> float:
    """Return the cores of a replica; all replicas together must not exceed the machine, or Ray waits."""
    most = MOST_CORES if choice.devices else choice.machine.cores - 1
    shares = (*range(most, 0, -1), 0.5, 0.25)
    return next((share for share in shares if share * choice.replicas <= spare), 0)


def _ingress(cores: float, most: int) -> Section:
    """Return the options of the Ingress.

    Args:
        cores: Cores of a replica.
        most: Maximum replicas that the remaining cores allow.
    """
    most = min(MOST_INGRESS, most)
    options = Noted({"num_cpus": Noted(cores if cores < 1 else int(cores))})
    if most < 2:
        options.value["num_cpus"].comment = "...that reserves this much of a core in Ray."
        return {"num_replicas": Noted(1, "One replica..."), "ray_actor_options": options}
    options.value["num_cpus"].comment = "A replica runs in one thread."
    return {
        "autoscaling_config": Noted(
            {
                "min_replicas": Noted(1, "One replica relays thousands of tokens per second."),
                "max_replicas": Noted(most),
                "target_ongoing_requests": Noted(
                    200, "Concurrent requests per replica; above it Serve starts another replica."
                ),
            }
        ),
        "ray_actor_options": options,
    }


def _deployment(choice: Choice, cores: float) -> Section:
    if choice.nodes > 1:
        reason = (
            f"Copies of the model, each with the GPUs of {choice.nodes} of {choice.machine.nodes} machines."
        )
        return {"num_replicas": Noted(choice.replicas, f"{reason} `nodes` reserves them.")}
    options: Section = {}
    if choice.devices:
        options["num_gpus"] = Noted(choice.devices, "GPUs per replica.")
        options["num_cpus"] = Noted(cores, "Cores per replica: tokenizing, scheduling, streaming.")
        count = len(choice.machine.gpus)
        reason = f"Copies of the model. This machine has {count} GPU{'s' if count > 1 else ''}."
    elif choice.replicas > 1:
        options["num_cpus"] = Noted(cores, "Cores per replica; the rest of the service uses the other cores.")
        reason = "Copies of the model, which share the cores of this machine."
    else:
        options["num_cpus"] = Noted(
            cores, "Cores of the engine; one core is left for the rest of the service."
        )
        reason = "One copy of the model."
    return {"num_replicas": Noted(choice.replicas, reason), "ray_actor_options": Noted(options)}
