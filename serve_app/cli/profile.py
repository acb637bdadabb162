"""The command `saturate profile`."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import click

from serve_app.cli.api_key import read_api_key
from serve_app.cli.option_values import check_folder, parsed
from serve_app.client import ServiceError, base_url
from serve_app.simulation.profiles import Profile
from serve_app.stats import SchedulerFigures
from serve_app.system.disk import replace_text
from serve_app.system.progress import Progress
from serve_app.tuning.profiling import LARGEST_ERROR, file_of, learn, profile_of, source_of
from serve_app.tuning.service import ModelFacts, Service

BAD_PROFILE = 3
"""Exit code for a profile with a large error."""


@click.command()
@click.argument("url", callback=parsed(base_url))
@click.option("--model", metavar="ID", help="Model whose engine is read; needed if the service has several.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="YAML file to write the profile to.  [default: standard output]",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the profile.  [default: the model's id]",
)
def profile(
    url: str,
    model: str | None,
    api_key_env: str | None,
    output: Path | None,
    overwrite: bool,
    name: str | None,
) -> int:
    """Print the profile of a running device: the times of steps that the engine at URL has learned.

    An engine learns the times from all its steps. With traffic nothing is sent, and the profile is there at
    once. An idle engine gets some 400 requests first, for a minute at most.

    The file is for `saturate plan --device FILE` and for `simulate: FILE` in a config.

    \b
    Exit codes:
      0  there is a profile
      1  there is no service, or its engine has not learned enough
      2  an option is wrong; nothing was sent
      3  the profile is written, but its mean error is above 10%

    \b
    Examples:
      saturate profile http://127.0.0.1:8000 --output my-gpu.yaml
      saturate profile https://llm.example.org --model qwen2.5-7b --api-key-env KEY --output qwen.yaml
    """
    if output is not None and output.exists() and not overwrite:
        raise click.UsageError(f"--output {output}: exists; add --overwrite to replace it")
    check_folder("--output", output)
    key = read_api_key(api_key_env)
    progress = Progress()
    try:
        facts, learned = asyncio.run(_learned(url, key, model, progress))
    except ServiceError as error:
        raise click.ClickException(str(error)) from None
    progress.end()
    made = profile_of(facts, learned, name or facts.model, source_of(url, datetime.now(UTC)))
    click.echo(summary(made, learned), err=output is None)
    try:
        _write(output, file_of(made, learned))
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    if learned.step_error <= LARGEST_ERROR:
        return 0
    click.echo(
        f"warning: the profile describes the device badly: its mean error is {learned.step_error:.0%} "
        f"(at most {LARGEST_ERROR:.0%}). The usual cause is other work on the machine",
        err=True,
    )
    return BAD_PROFILE


async def _learned(
    url: str, key: str | None, model: str | None, progress: Progress
) -> tuple[ModelFacts, SchedulerFigures]:
    """Return the facts about a model of the service at `url`, and what its engine has learned."""
    async with Service(url, api_key=key) as service:
        found = await service.find(model)
        progress.show(f"the first answer of {found}")
        await service.first_answer(found)
        return await learn(service, await service.facts(found), progress.show)


def summary(profile: Profile, learned: SchedulerFigures) -> str:
    """Return the times of a profile in words."""
    return (
        f"a step of {profile.name}: {profile.base_ms:g} ms, {profile.per_prefill_token_ms:g} ms per token of "
        f"a prompt, {profile.per_sequence_ms:g} ms per sequence, {profile.per_kv_token_ms:g} ms per token of "
        f"context\nlearned from {learned.steps:,} steps, mean error {learned.step_error:.1%}"
    )


def _write(path: Path | None, text: str) -> None:
    if path is None:
        click.echo(text, nl=False)
    else:
        replace_text(path, text)
        click.echo(f"written to {path}")
