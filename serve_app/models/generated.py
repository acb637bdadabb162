"""The Serve config that `saturate serve MODEL` runs, and what to say of it."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from serve_app.models import installed_vllm
from serve_app.models.choose import GOOD_CONTEXT, SEQUENCES, Choice, choose
from serve_app.models.demo import NAME, demo_service
from serve_app.models.devices import Machine
from serve_app.models.engine_check import check_engine
from serve_app.models.errors import ModelError, OptionError
from serve_app.models.hub import Hub
from serve_app.models.memory import gb
from serve_app.models.model_service import context_reason, model_service, service_id, sums_line
from serve_app.models.overrides import Override, check, engine_options, value_at
from serve_app.models.service import ServeConfig, ServiceParts, serve_config
from serve_app.models.source import read_source
from serve_app.settings.messages import plain_errors
from serve_app.settings.schema import SettingsError, parse
from serve_app.system.yaml_text import load, put

SET = "Set on the command line."


@dataclass(frozen=True)
class Generated:
    """A config and its explanation.

    Attributes:
        text: The Serve config, as YAML.
        summary: What was chosen and why, as lines.
    """

    text: str
    summary: tuple[str, ...]


def generate(
    name: str,
    overrides: Sequence[Override],
    *,
    words: Sequence[str],
    machine: Callable[[], Machine],
    hub: Callable[[], Hub],
) -> Generated:
    """Return the config for a model on this machine.

    Args:
        name: "demo", a directory, or a Hugging Face id.
        overrides: Values that the user has set.
        words: The user's command line behind `saturate serve`, for the config's first comment.
        machine: Finds the devices.
        hub: Makes the client of the hub.

    Raises:
        ModelError: The model can't be served here.
        OptionError: A value that was set is wrong.
    """
    check(overrides)
    command = f"saturate serve {shlex.join(words)}"
    id = value_at(overrides, "model", "id")
    if name == NAME:
        found, notes = _usable(machine(), needs_device=False)
        service = demo_service(found, _head("The demo model", command, "no download", ()))
        config = _with(serve_config(replace(service, id=id) if id else service), overrides)
        return Generated(_checked(config), (*_demo_summary(service, found), *notes, *_address(config)))
    given = engine_options(overrides)
    if given.get("max_model_len") == -1:
        # The choice is the longest context that fits, too.
        del given["max_model_len"]
    files = read_source(name, given.get("revision"), hub)
    found, notes = _usable(machine(), needs_device=True)
    copies = value_at(overrides, "deployment", "num_replicas")
    choice = choose(
        files,
        found,
        given,
        # "auto" leaves the number to Ray Serve, which refuses anything else later.
        replicas=copies if type(copies) is int else None,
        known=installed_vllm.architectures(),
    )
    loading = f"downloads {gb(files.weight_bytes)}" if files.download else "no download"
    head = _head(f"{files.source} on {_devices(found)}", command, loading, choice.notes)
    config = _with(serve_config(model_service(choice, id or service_id(files.source), head)), overrides)
    summary = (*_summary(choice), *notes, *(f"note       {note}" for note in choice.notes))
    return Generated(_checked(config), (*summary, *_address(config)))


def _usable(machine: Machine, *, needs_device: bool) -> tuple[Machine, list[str]]:
    """Return the machine as the installed vLLM sees it.

    Raises:
        ModelError: It can't use the machine at all.
    """
    build = installed_vllm.build()
    if machine.gpus and build == "cpu":
        note = (
            f"note       {_devices(machine)} found, but the installed vLLM is its CPU build; for GPUs: "
            "pip install -e '.[gpu]'"
        )
        return replace(machine, gpus=()), [note]
    if not machine.gpus and build == "gpu" and needs_device:
        raise ModelError(
            "no GPU found (`nvidia-smi` lists none, or CUDA_VISIBLE_DEVICES hides them), and the installed "
            "vLLM needs one; on a CPU: uv pip install --torch-backend=cpu -e '.[cpu]'"
        )
    return machine, []


def _head(subject: str, command: str, loading: str, notes: Sequence[str]) -> str:
    return "\n".join(
        [
            f"{subject}: {loading}. configs/README.md explains the format. `saturate serve FILE.yaml` runs "
            "it; made by",
            f"   {command}",
            *notes,
        ]
    )


def _with(config: ServeConfig, overrides: Sequence[Override]) -> ServeConfig:
    """Set the values of the user in a config, and return it."""
    sections = {
        "http": config.http,
        "args": config.args,
        "model": config.model,
        "deployment": config.deployment,
    }
    for override in overrides:
        put(sections[override.part], override.place, override.value, SET)
    if "autoscaling_config" in config.deployment:
        # Serve takes one of the two.
        config.deployment.pop("num_replicas", None)
    return config


def _checked(config: ServeConfig) -> str:
    """Return a config as text.

    Raises:
        OptionError: A value that was set is wrong.
    """
    text = config.text()
    content: Any = load(text)
    try:
        (app,) = ServeDeploySchema.model_validate(content).applications
        for model in parse(app.args).models:
            check_engine(model)
    except SettingsError as error:
        raise OptionError(str(error)) from None
    except ValidationError as error:
        raise OptionError(f"Ray Serve refuses a value that was set: {plain_errors(error)}") from None
    except ValueError as error:
        raise OptionError(str(error)) from None
    return text


def _devices(machine: Machine) -> str:
    if not machine.gpus:
        cores = machine.cores
        return f"the CPU ({cores} core{'s' if cores > 1 else ''}, {gb(machine.memory)} of memory available)"
    names = sorted({gpu.name for gpu in machine.gpus})
    memory = gb(min(gpu.memory for gpu in machine.gpus))
    each = " each" if len(machine.gpus) > 1 else ""
    return f"{len(machine.gpus)} x {' and '.join(names)} ({memory}{each})"


def _demo_summary(service: ServiceParts, machine: Machine) -> tuple[str, ...]:
    place = "one GPU" if machine.gpus else "the CPU"
    return (
        f"model      {service.source}, which comes with this package: 0.8 million parameters, no download",
        f"device     {place}; it needs no more",
    )


def _summary(choice: Choice) -> tuple[str, ...]:
    files, parsers = choice.files, choice.parsers
    kind = f"{choice.architecture.model_type}, {gb(files.weight_bytes)} of weights"
    method = f" ({choice.architecture.quantization})" if choice.architecture.quantization else ""
    loading = ", downloaded at the first start" if files.download else ""
    copies = f"{choice.replicas} replica{'s' if choice.replicas > 1 else ''}"
    if not choice.devices:
        spread = "one replica"
    elif choice.tensor_parallel > 1:
        spread = (
            f"{copies}, tensor_parallel_size {choice.tensor_parallel}: fewer GPUs have no room for the "
            f"model and {SEQUENCES} requests of {GOOD_CONTEXT:,} tokens"
        )
    else:
        spread = f"{copies}, one per {'GPU' if choice.devices == 1 else f'{choice.devices} GPUs'}"
    return (
        f"model      {files.source}: {kind}{method}{loading}",
        f"device     {_devices(choice.machine)}",
        f"memory     {sums_line(choice.sums)}",
        f"dtype      {choice.dtype}",
        f"context    max_model_len {choice.max_model_len:,}: "
        f"{context_reason(choice.architecture, choice.max_model_len, choice.sums.tokens)}",
        f"step       max_num_seqs {choice.max_num_seqs}, max_num_batched_tokens "
        f"{choice.max_num_batched_tokens:,}",
        f"spread     {spread}",
        f"parsers    tools: {parsers.tools or 'none known'}, reasoning: {parsers.reasoning or 'none'}",
    )


def _address(config: ServeConfig) -> tuple[str, ...]:
    http = config.http
    return (
        f"address    http://{http['host'].value}:{http['port'].value}, model {config.model['id'].value}",
        "--print-config prints the config with comments, --set PATH=VALUE changes a value",
    )
