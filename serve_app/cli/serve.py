"""The command `saturate serve`."""

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from serve_app.cli.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from serve_app.models.generated import Generated
    from serve_app.models.overrides import Override

DEMO = Path(__file__).parents[2] / "configs/local.yaml"
"""The demo config; a checkout has it, an installed package doesn't."""


class Target(NamedTuple):
    """The model or config to serve, with options of `vllm serve`.

    Attributes:
        name: The argument: a config, a directory, a Hugging Face id or "demo"; None: there is none.
        overrides: Options of `vllm serve` that were given.
        words: The words that these were read from.
    """

    name: str | None
    overrides: "tuple[Override, ...]" = ()
    words: tuple[str, ...] = ()


def read_target(context: click.Context, parameter: click.Parameter, words: Sequence[str]) -> Target:
    """Return what is served, from all words that are no options of this command."""
    if context.resilient_parsing:
        return Target(None)
    if not any(word.startswith("-") for word in words):
        names: Sequence[str] = words
        overrides: list[Override] = []
    else:
        # The names of vLLM's options are read from its files, which takes a moment.
        from serve_app.models.errors import OptionError
        from serve_app.models.overrides import read_options

        own = [option for own in context.command.params for option in own.opts if option.startswith("--")]
        try:
            names, overrides = read_options(words, own)
        except OptionError as error:
            raise click.UsageError(str(error), context) from None
    if len(names) > 1:
        raise click.UsageError(
            f"one model or config, not {len(names)}: {', '.join(names)}; a config can have several models",
            context,
        )
    return Target(names[0] if names else None, tuple(overrides), tuple(words))


def read_settings(
    context: click.Context, parameter: click.Parameter, settings: Sequence[str]
) -> "tuple[tuple[str, Override], ...]":
    """Return the values of `--set`, each with its text."""
    if not settings or context.resilient_parsing:
        return ()
    from serve_app.models.errors import OptionError
    from serve_app.models.overrides import read_setting

    try:
        return tuple((setting, read_setting(setting)) for setting in settings)
    except OptionError as error:
        raise click.UsageError(str(error), context) from None


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "target",
    metavar="[MODEL | CONFIG] [OPTIONS OF vllm serve]",
    nargs=-1,
    type=click.UNPROCESSED,
    callback=read_target,
)
@click.option(
    "--set",
    "settings",
    metavar="PATH=VALUE",
    multiple=True,
    callback=read_settings,
    help="Change a value of MODEL's config; may be repeated. PATH begins with engine., batcher., sampling. "
    "or another setting of the model; with ingress., batches., access., telemetry. or usage.; with http. "
    "(host, port); or with deployment. (num_replicas, ray_actor_options.num_cpus). VALUE is YAML.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the complete config, with comments, and end. That of a MODEL is for your repository: "
    "`saturate serve FILE.yaml` does the same without choosing again. A CONFIG gets the environment "
    "variables that it leaves out, for `serve run`, `serve deploy` and KubeRay.",
)
@click.option("--verbose", is_flag=True, help="Show the log of Ray, Serve and vLLM too.")
@click.option(
    "--log-format",
    type=click.Choice(["json", "text"]),
    help="Print a line per request: json for programs, text for people. Takes the place of "
    "telemetry.request_log in the config.",
)
def serve(
    target: Target,
    settings: "tuple[tuple[str, Override], ...]",
    print_config: bool,
    verbose: bool,
    log_format: str | None,
) -> int:
    """Serve a model, or the models of a config, until Ctrl-C, SIGTERM or `saturate stop`.

    MODEL is a Hugging Face id, a directory with config.json and *.safetensors, or `demo`, a small model that
    needs no GPU and no download. The command finds the devices of this machine, reads the size of the model,
    chooses the settings, says them with their reasons, and starts. It refuses a model that doesn't fit before
    any download, with the sums and with what would fit.

    CONFIG is a config of Ray Serve, a .yaml file, for everything beyond: several models, a cluster, scaling.
    Without an argument the demo is served.

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
      a cluster              saturate serve config.yaml --print-config > complete.yaml,
                             serve deploy complete.yaml

    Any option of `vllm serve` is taken as vLLM spells it (--max-model-len 8k, -tp 2, --enforce-eager,
    --speculative-config.model NAME). It goes to the engine, or becomes a setting of this service
    (--served-model-name, --lora-modules, --allowed-origins), or is refused with the setting that does it.
    Exit codes: 0 stopped; 1 the service failed, or something else has its port; 2 the command, the config or
    the model is wrong, and nothing was started.

    The service stays in the foreground. To stop, it lets requests in flight finish; a second Ctrl-C cuts them
    off. However it ends, no process of it is left: neither after a closed terminal nor after SIGKILL.

    \b
    Examples:
      saturate serve demo
      saturate serve Qwen/Qwen2.5-7B-Instruct --max-model-len 8192
      saturate serve ./my-model --set sampling.max_tokens=1024 --print-config
      saturate serve configs/qwen2.5-7b-l4.yaml --log-format text
    """
    # Ray takes a second to import: `--help` and completion do without it.
    from serve_app.cli.launch import launch
    from serve_app.models.source import is_config

    overrides = (*target.overrides, *(override for _, override in settings))
    if target.name is None and DEMO.is_file() and not overrides and not print_config:
        return launch(DEMO, verbose=verbose, log_format=log_format)
    name = target.name or "demo"
    if is_config(name):
        if overrides:
            raise click.UsageError(
                f"{name} is a config: change its values there; --set and options of `vllm serve` are for a "
                "model"
            )
        if print_config:
            sys.stdout.write(_complete_text(name))
            return 0
        return launch(Path(name), verbose=verbose, log_format=log_format)
    words = [*(() if target.name else (name,)), *target.words]
    for text, _ in settings:
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


MODELINE = "# yaml-language-server:"
"""Beginning of a line that tells editors the schema of a file."""


def _complete_text(name: str) -> str:
    """Return a config with what it leaves out, for Ray Serve's own commands and KubeRay.

    Raises:
        ConfigError: The config is wrong.
    """
    from serve_app.cli.config_text import completed
    from serve_app.cli.serve_config import read_config

    path = Path(name)
    read_config(path)
    lines = path.read_text().splitlines(keepends=True)
    # The path of the schema is that of an editor with the config; the copy may stand elsewhere.
    text = "".join(line for line in lines if not line.startswith(MODELINE))
    return (
        "# For `serve run`, `serve deploy` and KubeRay: a config with all that `saturate serve` adds to it.\n"
        "# Change the config, not this file, and print it anew:\n"
        f"#   saturate serve {shlex.quote(name)} --print-config\n\n"
        f"{completed(text)}"
    )


def _generate(name: str, overrides: "Sequence[Override]", words: Sequence[str]) -> "Generated":
    """Return the config for a model on this machine.

    Raises:
        ConfigError: The model can't be served here.
        LaunchError: The hub can't be reached.
        click.UsageError: A value that was set is wrong.
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
