"""The command `saturate serve`."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serve_app.cli.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from serve_app.models.generated import Generated
    from serve_app.models.overrides import Override


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "target",
    metavar="[MODEL | CONFIG] [OPTIONS OF vllm serve]",
    nargs=-1,
    type=click.UNPROCESSED,
)
@click.option(
    "--set",
    "settings",
    metavar="PATH=VALUE",
    multiple=True,
    help="Change a value of MODEL's config; may be repeated. PATH begins with engine., batcher., sampling. "
    "or another setting of the model; with ingress., batches., access., telemetry. or usage.; with http. "
    "(host, port); or with deployment. (num_replicas, ray_actor_options.num_cpus). VALUE is YAML.",
)
@click.option("--host", metavar="ADDRESS", help="Address to listen on (http.host).")
@click.option("--port", metavar="PORT", help="Port to listen on (http.port).")
@click.option("--served-model-name", metavar="NAME", help="The name that clients put in `model` (id).")
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the config, with comments, and exit. Keep the config of a MODEL in your repository: "
    "`saturate serve FILE.yaml` serves it with the same settings. A CONFIG is checked, and printed as it is.",
)
@click.option("--verbose", is_flag=True, help="Show the log of Ray, Serve and vLLM too.")
@click.option(
    "--log-format",
    type=click.Choice(["json", "text"]),
    help="Print a line per request: json for programs, text for people. Overrides telemetry.request_log in "
    "the config.",
)
def serve(
    target: Sequence[str],
    settings: Sequence[str],
    print_config: bool,
    verbose: bool,
    log_format: str | None,
    **moved: str | None,
) -> int:
    """Serve a model, or the models of a config, until Ctrl-C, SIGTERM or `saturate stop`.

    MODEL is a Hugging Face id, a directory with config.json and *.safetensors, or `demo`, a small model that
    needs no GPU and no download. The command finds the devices of this machine, reads the size of the model,
    chooses the settings, prints them with their reasons, and starts. It refuses a model that doesn't fit
    before any download, with the memory sums and with alternatives that fit.

    CONFIG is a config of Ray Serve, a .yaml file, for several models, a cluster or scaling. Without an
    argument the command serves the demo.

    \b
    How to choose:
      a first look           saturate serve demo
      one model, this host   saturate serve Qwen/Qwen2.5-7B-Instruct
      longer prompts         --max-model-len 32768: fewer requests at once
      more tokens in all     --max-num-seqs 512: each request is slower
      shorter waits beside batch work
                             --set 'batcher.goals={ttft_p99_s: 0.5, tpot_p99_s: 0.05}'
      out of memory          --gpu-memory-utilization 0.85
      other machines may call
                             --host 0.0.0.0 --set access.keys_file=/etc/saturate/keys.yaml
      production             --print-config > config.yaml, change it, saturate serve config.yaml
      a cluster              serve deploy config.yaml

    The command accepts any option of `vllm serve` (--max-model-len 8k, -tp 2, --enforce-eager,
    --speculative-config.model NAME): vLLM's own parser reads them, in a process of its own, which takes 10 to
    20 seconds. An option goes to the engine, becomes a setting of this service (--lora-modules,
    --allowed-origins), or is refused with the setting to use instead.
    Exit codes: 0 stopped; 1 the service failed, or its port is in use; 2 the command, the config or the model
    is wrong, and nothing was started.

    The service stays in the foreground. To stop, it finishes the requests in flight; a second Ctrl-C cancels
    them. All its processes end with it, even after a closed terminal or SIGKILL.

    \b
    Examples:
      saturate serve demo
      saturate serve Qwen/Qwen2.5-7B-Instruct --max-model-len 8192
      saturate serve ./my-model --set sampling.max_tokens=1024 --print-config
      saturate serve configs/qwen2.5-7b-l4.yaml --log-format text
    """
    # An import of Ray takes a second; `--help` and completion don't need it.
    from serve_app.models.source import is_config
    from serve_app.settings.environment import prepare_ray

    prepare_ray()
    from serve_app.cli.foreground import launch
    from serve_app.cli.serve_config import read_config

    names, overrides = _read(target, settings, moved)
    name = names[0] if names else "demo"
    if is_config(name):
        if overrides:
            raise click.UsageError(
                f"{name} is a config: change its values in the file; --set and options of `vllm serve` are "
                "for a model"
            )
        if print_config:
            read_config(Path(name))
            sys.stdout.write(Path(name).read_text())
            return 0
        return launch(Path(name), verbose=verbose, log_format=log_format)
    words = [*(() if names else (name,)), *target]
    for option, value in sorted(moved.items()):
        words += [_form(option), value] if value is not None else []
    for text in settings:
        words += ["--set", text]
    generated = _generate(name, overrides, words)
    if print_config:
        sys.stdout.write(generated.text)
        return 0
    print(*generated.summary, sep="\n", file=sys.stderr)
    with tempfile.NamedTemporaryFile("w", prefix="saturate-", suffix=".yaml") as file:
        file.write(generated.text)
        file.flush()
        return launch(Path(file.name), verbose=verbose, log_format=log_format)


def _form(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _read(
    target: Sequence[str], settings: Sequence[str], moved: Mapping[str, str | None]
) -> "tuple[list[str], list[Override]]":
    """Return the arguments, at most one, and all values of the user.

    Args:
        target: The words that aren't options of this command.
        settings: The values of `--set`.
        moved: Options of this command for settings of a config, by their names in `PATHS`.

    Raises:
        click.UsageError: A word, an option or a setting is wrong.
    """
    from serve_app.models.errors import OptionError
    from serve_app.models.overrides import PATHS, read_options, read_setting

    context = click.get_current_context()
    own = [form for option in context.command.params for form in option.opts if form.startswith("--")]
    try:
        overrides = [read_setting(setting) for setting in settings]
        overrides += [
            read_setting(f"{PATHS[option]}={value}", _form(option))
            for option, value in moved.items()
            if value is not None
        ]
        names, given = read_options(target, own, overrides)
    except OptionError as error:
        raise click.UsageError(str(error), context) from None
    if len(names) > 1:
        raise click.UsageError(
            f"one model or config, not {len(names)}: {', '.join(names)}; a config can have several models",
            context,
        )
    return names, [*given, *overrides]


def _generate(name: str, overrides: "Sequence[Override]", words: Sequence[str]) -> "Generated":
    """Return the config for a model on this machine.

    Raises:
        ConfigError: The model can't be served here.
        LaunchError: The hub can't be reached.
        click.UsageError: A value set by the user is wrong.
    """
    from serve_app.models.devices import find_machine
    from serve_app.models.errors import ModelError, OptionError
    from serve_app.models.generated import generate
    from serve_app.models.hub import HubAwayError, HuggingFaceHub

    try:
        return generate(name, overrides, words=words, machine=find_machine, hub=HuggingFaceHub)
    except HubAwayError as error:
        raise LaunchError(str(error)) from None
    except ModelError as error:
        raise ConfigError(str(error)) from None
    except OptionError as error:
        raise click.UsageError(str(error)) from None
