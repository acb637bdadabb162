"""The command `saturate profile`."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import click

from serve_app.cli.api_key import read_api_key
from serve_app.cli.option_values import check_folder, parsed
from serve_app.client import ServiceError, base_url
from serve_app.simulation.profiles import Profile
from serve_app.system.progress import Progress
from serve_app.tuning.plots import PlotError, check_plot, draw_profile
from serve_app.tuning.profiling import (
    LARGEST_ERROR,
    LEAST_R2,
    Fit,
    Measurement,
    ObservationError,
    Timing,
    file_of,
    fit,
    profile_of,
    source_of,
)
from serve_app.tuning.service import ModelFacts, Service

BAD_FIT = 3
"""Exit code for a bad fit."""


@click.command()
@click.argument("url", callback=parsed(base_url))
@click.option("--model", metavar="ID", help="Model to measure; needed if the service has several.")
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
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(min=64),
    metavar="N",
    help="Most tokens in a step: the longest measured prompt, and a value of the profile.  [default: the "
    "service's setting]",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.png",
    help="Draw the measured points and the profile's line; needs saturate[plot].",
)
def profile(
    url: str,
    model: str | None,
    api_key_env: str | None,
    output: Path | None,
    overwrite: bool,
    name: str | None,
    max_num_batched_tokens: int | None,
    plot: Path | None,
) -> int:
    """Measure the profile of a running device, through the service at URL.

    The measurement takes a minute at most, on a service without other traffic and with one replica of the
    model. It times lone prompts of several lengths, concurrent answers up to max_num_seqs, and answers with
    long contexts, and fits the parameters of a step to these times. Prompts are random, so the prefix cache
    has no effect.

    The file is for `saturate plan --device FILE` and for `simulate: FILE` in a config.

    \b
    Exit codes:
      0  the profile describes the measured times
      1  there is no service, or it can't be measured
      2  an option is wrong; nothing was measured
      3  the profile is written, but describes the measured times badly; the table of residuals shows where

    \b
    Examples:
      saturate profile http://127.0.0.1:8000 --output my-gpu.yaml
      saturate profile https://llm.example.org --model qwen2.5-7b --api-key-env KEY --output qwen.yaml
    """
    if output is not None and output.exists() and not overwrite:
        raise click.UsageError(f"--output {output}: exists; add --overwrite to replace it")
    check_folder("--output", output)
    check_folder("--plot", plot)
    try:
        if plot is not None:
            check_plot()
    except PlotError as error:
        raise click.UsageError(f"--plot: {error}") from None
    key = read_api_key(api_key_env)
    progress = Progress()
    try:
        facts, tokens, measurement = asyncio.run(_measure(url, key, model, max_num_batched_tokens, progress))
        found = fit(measurement.observations)
        source = source_of(url, datetime.now(UTC))
        made = profile_of(found, measurement.bursts, facts, name or facts.model, tokens, source)
    except (ServiceError, ObservationError) as error:
        raise click.ClickException(str(error)) from None
    progress.end(f"{len(measurement.observations)} points measured")
    text = file_of(made, found)
    click.echo(summary(made, found, measurement.observations), err=output is None, nl=False)
    for warning in measurement.warnings:
        click.echo(f"warning: {warning}", err=True)
    try:
        if plot is not None:
            draw_profile(made.name, measurement.observations, found, plot)
        _write(output, text)
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    if not found.bad:
        return 0
    click.echo(
        f"warning: the profile describes the device badly: R² {found.r2:.4f} (at least {LEAST_R2}), largest "
        f"difference {found.largest_error:.0%} (at most {LARGEST_ERROR:.0%}). The usual causes are other "
        "work on the machine, prompts above max_num_batched_tokens, and steps that don't grow evenly",
        err=True,
    )
    return BAD_FIT


async def _measure(
    url: str, key: str | None, model: str | None, step_tokens: int | None, progress: Progress
) -> tuple[ModelFacts, int, Measurement]:
    """Measure a model of the service at `url`; return the facts, `max_num_batched_tokens` and the points."""
    async with Service(url, api_key=key) as service:
        found = await service.find(model)
        progress.show(f"the first answer of {found}")
        await service.first_answer(found)
        facts = await service.facts(found)
        tokens = step_tokens or facts.max_num_batched_tokens
        if tokens is None:
            raise ServiceError(
                f"{url} doesn't report the engine's max_num_batched_tokens; give --max-num-batched-tokens"
            )
        measurement = Measurement(service, facts, tokens, progress.show)
        await measurement.run()
        return facts, tokens, measurement


def summary(profile: Profile, fit: Fit, observations: list[Timing]) -> str:
    """Return a table of the measured times and the profile's times."""
    width = max(len(each.about) for each in observations)
    lines = [f"{'':{width}}  measured   profile  difference"]
    for each, predicted in zip(observations, fit.predicted, strict=True):
        difference = predicted / each.milliseconds - 1
        lines.append(
            f"{each.about:{width}}  {each.milliseconds:5.1f} ms  {predicted:5.1f} ms  {difference:+9.1%}"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"a step of {profile.name}: {profile.base_ms:g} ms, {profile.per_prefill_token_ms:g} ms per "
            f"token of a prompt, {profile.per_sequence_ms:g} ms per sequence, {profile.per_kv_token_ms:g} ms "
            "per token of context",
            *(
                [f"the first {profile.hidden_prefill_tokens} tokens of prompts in a step take no time"]
                if profile.hidden_prefill_tokens
                else []
            ),
            f"a request: {profile.request_ms:g} ms more until its first token, of which "
            f"{profile.serial_ms:g} ms are serial",
            f"R² {fit.r2:.4f}, largest difference {fit.largest_error:.1%}",
            "",
        ]
    )


def _write(path: Path | None, text: str) -> None:
    if path is None:
        click.echo(text, nl=False)
    else:
        path.write_text(text)
        click.echo(f"written to {path}")
