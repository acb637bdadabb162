"""The service of the demo model, as in configs/local.yaml."""

from serve_app.models.devices import Machine
from serve_app.models.service import ONE_PROCESS, ServiceParts, described
from serve_app.settings.models import EngineSettings
from serve_app.settings.sources import DEMO_MODEL
from serve_app.system.yaml_text import Noted, Section

NAME = "demo"


def demo_service(machine: Machine, head: str) -> ServiceParts:
    """Return the service of the demo model.

    Args:
        machine: The machine. If it has GPUs, a CUDA build of vLLM is installed, and the model takes one GPU.
        head: Comment at the top of the config.
    """
    gpu = bool(machine.gpus)
    # The Ingress reserves half a core: on a one-core machine, Ray would wait forever for a whole core.
    cores, words = (1, "one core") if machine.cores > 1 else (0.5, "half a core")
    options: Section = {
        "num_cpus": Noted(cores, f"...that reserves {words}, and {'a' if gpu else 'no'} GPU."),
    }
    if gpu:
        options["num_gpus"] = Noted(1)
    return ServiceParts(
        head=head,
        id=NAME,
        source=DEMO_MODEL,
        engine=_engine(),
        sampling=Noted(
            {"temperature": Noted(0), "max_tokens": Noted(16)},
            "Defaults of /generate. Greedy, since the demo model does sums.",
        ),
        folder="local",
        ingress={
            "num_replicas": Noted(1, "One replica..."),
            "ray_actor_options": Noted({"num_cpus": Noted(0.5, "...that reserves half a core in Ray.")}),
        },
        deployment={
            "num_replicas": Noted(1, "One copy of the model..."),
            "ray_actor_options": Noted(options),
        },
    )


def _engine() -> Section:
    return {
        **described(EngineSettings, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=4096),
        "kv_cache_memory_bytes": Noted(
            256 << 20, "Bytes of KV cache. 256 MiB hold 131,072 tokens of this model."
        ),
        "enforce_eager": Noted(True, "No compilation: for a model this small it takes longer than it saves."),
        "distributed_executor_backend": ONE_PROCESS,
        "enable_auto_tool_choice": Noted(
            True,
            "Clients may offer tools. The demo model uses a tool only if `tool_choice` forces it; the tool "
            "needs `strict: true`, else its arguments come back as a quoted string.",
        ),
        "tool_call_parser": Noted("hermes"),
    }
