"""The command `saturate tune`."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import click

from serve_app.cli.api_key import read_api_key
from serve_app.cli.option_values import check_folder, parsed
from serve_app.cli.plan import NO_PLAN
from serve_app.cli.tune_config import RunningConfig, read_config, write_config
from serve_app.client import ServiceError, base_url
from serve_app.dataset.options import DEFAULT_URL
from serve_app.system.progress import Progress
from serve_app.tuning.goals import METRICS, Goal, parse_goals
from serve_app.tuning.load import BENCH, Axis, Bench, BenchError, LoadPoint, ReportError, read_reports
from serve_app.tuning.plots import PlotError, check_plot, draw_tuning
from serve_app.tuning.service import ModelFacts, Service
from serve_app.tuning.tuner import Tuning, search
from serve_app.tuning.workload import TokenLengths

OTHERS = 0.02
"""Other requests as a share of the sent requests, above which a warning reports them."""


@click.command()
@click.argument("url", default=DEFAULT_URL, callback=parsed(base_url))
@click.option("--model", metavar="ID", help="Model to load; needed if the service has several.")
@click.option(
    "--goal",
    "goals",
    callback=parsed(parse_goals),
    required=True,
    metavar="GOAL[,GOAL]",
    help=f"METRIC_PERCENTILE<SECONDS, as in ttft_p99<0.5. Metrics: "
    f"{'; '.join(f'{name}: {about}' for name, about in METRICS.items())}. Chats: ttft_p99<0.5 to 1, and "
    "tpot_p99<0.05 to 0.1, the pace of a reader. Without a reader: latency_p95, the wait of the caller.",
)
@click.option(
    "--over",
    type=click.Choice(["concurrency", "rate"]),
    default="concurrency",
    show_default=True,
    help="What is raised. concurrency: clients that wait for their answers, as programs do. rate: requests "
    "per second at random times, as from many users.",
)
@click.option(
    "--input",
    callback=parsed(TokenLengths.parse),
    default="512",
    show_default=True,
    metavar="TOKENS",
    help="Tokens of a prompt: a number, or MEAN:SPREAD for lognormal lengths with this mean and standard "
    "deviation. Prompts are random, so the prefix cache has no effect.",
)
@click.option(
    "--output",
    callback=parsed(TokenLengths.parse),
    default="128",
    show_default=True,
    metavar="TOKENS",
    help="Tokens of an answer, in the format of --input; also the request's max_tokens, which the batcher "
    "reserves.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Length of a load; a run has about ten. A p99 needs 300 answers or more: at 5 per second, 60 s.",
)
@click.option(
    "--from",
    "reports",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="Take the loads from a report of GuideLLM or of `vllm bench serve --save-result`, in place of "
    "measurements; may be given several times. The loads must come from one replica.",
)
@click.option(
    "--apply",
    "apply_",
    is_flag=True,
    help="Change the settings of the service, without a restart, and measure the highest load again. Works "
    "on the machine of the service only. The next `serve deploy` reverts the settings unless --write puts "
    "them into the config.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CONFIG",
    help="Put the settings into this config; its comments stay.",
)
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the result as JSON, each load with its figures.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.png",
    help="Draw the goals' figures against the load; needs the extra plot.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the random numbers. Another seed sends other prompts.",
)
def tune(
    url: str,
    model: str | None,
    goals: tuple[Goal, ...],
    over: Axis,
    input: TokenLengths,
    output: TokenLengths,
    seconds: float,
    reports: tuple[Path, ...],
    apply_: bool,
    write: Path | None,
    api_key_env: str | None,
    json_file: Path | None,
    plot: Path | None,
    seed: int,
) -> int:
    """Find the highest load that holds latency goals on the service at URL, and settings for it.

    vLLM's serving benchmark (`vllm bench serve`) puts the load on the service. The load is doubled until a
    goal breaks, then halved between the load that holds and the load that breaks. The service should have no
    other traffic and a fixed number of replicas. A load with more than 1% of failed requests breaks. Without
    --apply the service stays unchanged.

    \b
    Exit codes:
      0  a load holds the goals
      1  there is no service, or it can't be measured
      2  an option is wrong; nothing was measured
      3  no load holds the goals, or the goals don't hold with the new settings

    \b
    Examples:
      saturate tune --goal "ttft_p99<0.5,tpot_p99<0.05" --input 512:256 --output 128:64
      saturate tune http://127.0.0.1:8000 --goal "ttft_p99<1" --over rate --apply --write config.yaml
      saturate tune --goal "ttft_p99<0.5" --from guidellm.json
    """
    try:
        if plot is not None:
            check_plot()
    except PlotError as error:
        raise click.UsageError(f"--plot: {error}") from None
    if write is not None:
        read_config(write)
    check_folder("--json", json_file)
    check_folder("--plot", plot)
    key = read_api_key(api_key_env)
    config = RunningConfig(url) if apply_ else None
    found = Tuning(model or "MODEL", f"{input} tokens in, {output} out, {seconds:g} s", goals, over)
    progress = Progress()
    try:
        if reports:
            named, found.points = read_reports(reports, over, goals)
            found.model = model or named or found.model
            found.requests = f"loads of {', '.join(path.name for path in reports)}"
            if config is not None and found.settings is not None:
                asyncio.run(config.apply(found.model, found.settings))
        else:
            lengths = input, output
            asyncio.run(measured(found, url, model, key, lengths, seconds, seed, config, progress))
    except ReportError as error:
        raise click.UsageError(f"--from {error}") from None
    except (
        ServiceError,
        BenchError,
        click.ClickException,
        KeyboardInterrupt,
        asyncio.CancelledError,
    ) as error:
        progress.end()
        # The finished loads took minutes: show their results.
        if found.points:
            _show(found, json_file, None)
        if isinstance(error, ServiceError | BenchError):
            raise click.ClickException(str(error)) from None
        raise
    progress.end()
    _show(found, json_file, plot)
    if write is not None and found.settings is not None:
        write_config(write, found.model, found.settings)
        click.echo(f"written to {write}")
    return 0 if found.holds else NO_PLAN


async def measured(
    found: Tuning,
    url: str,
    model: str | None,
    key: str | None,
    lengths: tuple[TokenLengths, TokenLengths],
    seconds: float,
    seed: int,
    config: RunningConfig | None,
    progress: Progress,
    *,
    command: Sequence[str] = BENCH,
) -> None:
    """Search for the highest load, and apply the settings for it.

    Args:
        found: The result, which gets the loads one by one.
        url: Base URL of the service.
        model: The model; None: the only one.
        key: The API key; None: no key.
        lengths: Tokens of a prompt, and of an answer.
        seconds: Length of a load.
        seed: Seed of the random numbers.
        config: The config to apply the settings to; None: don't apply them.
        progress: Shows the progress.
        command: Starts the benchmark.

    Raises:
        ServiceError: The service can't be measured.
        BenchError: The benchmark failed.
        click.ClickException: The lengths don't fit, or the settings can't be applied.
    """
    async with Service(url, api_key=key) as service:
        found.model = await service.find(model)
        progress.show(f"the first answer of {found.model}")
        await service.first_answer(found.model)
        before = await service.facts(found.model)
        found.replicas = before.replicas
        _check_lengths(before, *lengths)
        if before.in_flight:
            found.warnings.append(f"{before.in_flight} other requests ran or waited at the begin")
        async with Bench(
            url, found.model, key, found.over, *lengths, found.goals, seconds, seed=seed, command=command
        ) as bench:

            async def measure(value: float) -> LoadPoint:
                progress.show(f"{found.load(value)}, {seconds:g} s")
                point = await bench.measure(value)
                if point.failed:
                    _check_replicas(before, await service.facts(found.model))
                progress.end(found.line(point))
                return point

            async def noted(value: float) -> LoadPoint:
                found.points.append(await measure(value))
                return found.points[-1]

            closed = found.over == "concurrency"
            progress.show("a lone client")
            found.points.append(alone := await bench.alone())
            if not alone.completed:
                raise BenchError(f"all requests fail: {alone.error}")
            progress.end(found.line(alone))
            if alone.misses(found.goals):
                return
            await search(noted, found.goals, held=alone.value, whole=closed)
            if config is not None and found.best is not None and found.settings is not None:
                progress.show("applying the settings")
                await config.apply(found.model, found.settings)
                found.applied = await measure(found.best.value)
        _warn(found, before, await service.facts(found.model), bench.sent)


def _check_lengths(facts: ModelFacts, input: TokenLengths, output: TokenLengths) -> None:
    longest = input.most + output.most
    if facts.max_model_len and longest > facts.max_model_len:
        raise click.UsageError(
            f"--input and --output: prompt and answer may have {longest:,} tokens together, and the context "
            f"of {facts.model} has {facts.max_model_len:,}; take shorter lengths"
        )


def _check_replicas(before: ModelFacts, now: ModelFacts) -> None:
    """Raise a ServiceError if a replica is gone since the begin: its load says nothing."""
    if lost := before.names - now.names:
        raise ServiceError(
            f"{len(lost)} of {before.replicas} replicas of {before.model} ended during the load; the log of "
            "the service says why. Measure again"
        )


def _warn(found: Tuning, before: ModelFacts, after: ModelFacts, sent: int) -> None:
    """Add the warnings about other requests, changed replicas and short loads."""
    others = after.submitted - before.submitted - sent
    if others > OTHERS * sent:
        found.warnings.append(f"{others} other requests ran during the loads, and took a part of the service")
    if after.replicas != before.replicas:
        found.warnings.append(
            f"the model had {before.replicas} replicas at first and has {after.replicas} now: measure with a "
            "fixed number"
        )
    best = found.best
    if best is not None and best.is_small(found.goals):
        found.warnings.append(
            f"{best.completed} answers are few for the percentiles of the goals; use a longer --seconds"
        )


def _show(found: Tuning, json_file: Path | None, plot: Path | None) -> None:
    """Print a result, and write its files.

    Raises:
        click.ClickException: A file can't be written.
    """
    click.echo(found.text(), nl=False)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
    try:
        if json_file is not None:
            json_file.write_text(f"{json.dumps(found.body(), indent=2)}\n")
        if plot is not None:
            draw_tuning(found, plot)
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
