"""The command `saturate tune`."""

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource

from serve_app.cli.api_key import read_api_key
from serve_app.cli.option_values import check_folder, parse_time, parsed
from serve_app.cli.plan import NO_PLAN
from serve_app.cli.tune_config import RunningConfig, read_config, write_config
from serve_app.cli.tune_run import TuneOptions, TuneRun
from serve_app.client import ServiceError, base_url
from serve_app.dataset.errors import RowError
from serve_app.dataset.options import DEFAULT_URL
from serve_app.dataset.prompts import Prompter
from serve_app.dataset.readers import open_source
from serve_app.jobs.errors import RunError
from serve_app.ledger.report import LedgerError, LedgerFiles
from serve_app.system.progress import Progress
from serve_app.tuning.goals import METRICS, Goal, parse_goals
from serve_app.tuning.load import Prompt
from serve_app.tuning.plots import PlotError, check_plot, draw_tuning
from serve_app.tuning.tune_report import body, text
from serve_app.tuning.tuner import LoneMissError
from serve_app.tuning.workload import TokenLengths
from serve_app.wire.usage import Tokens

MOST_PROMPTS = 10_000
"""Most rows of a dataset."""


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
    "--input",
    callback=parsed(TokenLengths.parse),
    default="512",
    show_default=True,
    metavar="TOKENS",
    help="Tokens of a prompt: a number, or MEAN:SPREAD for lognormal lengths with this mean and standard "
    "deviation. Prompts are random, so the prefix cache has no effect: if your prompts share beginnings, use "
    "--ledger or --dataset.",
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
    "--dataset",
    metavar="FILE",
    help="Your own prompts, in place of --input: JSONL (CSV, Parquet) with a column `prompt` or `messages`, "
    "as for `saturate batch`. Answers end by themselves, or after --output tokens. Use more rows than a step "
    "has requests: a repeated prompt is in the prefix cache.",
)
@click.option(
    "--ledger",
    metavar="FOLDER",
    help="Lengths of real calls, in place of --input and --output: the folder or URL of the usage ledger "
    "(args.usage.ledger). Prompts are random, with a common beginning as long as the call's part in the "
    "prefix cache. Calls of /generate are left out, since they are lists.",
)
@click.option(
    "--since",
    callback=parsed(parse_time),
    metavar="TIME",
    help="With --ledger: calls that ended since this time: 90m, 24h, 7d or 4w ago, or a date. Your busiest "
    "hours give the best answer.  [default: 7d]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Length of a load step; a run has 15 to 20 steps. A p99 needs 300 requests or more: at 5 requests "
    "per second, 60 s. Longer steps make the answer more certain.",
)
@click.option(
    "--loop",
    type=click.Choice(["both", "open", "closed"]),
    default="both",
    show_default=True,
    help="open: requests at random times, as from many users; plan with its highest rate. closed: clients "
    "that wait for their answers, as programs do. both: the result of one search starts the other.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, 1e5, min_open=True),
    metavar="N",
    help="Measure this rate only, in requests per second, for instance the rate of your busiest minutes.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="Measure this number of clients only.",
)
@click.option(
    "--beside-batch",
    is_flag=True,
    help="Keep batch work running (service_tier flex), and report its tokens per second while live traffic "
    "at --rate holds its goal. With batcher.goals the batch work keeps steps short enough for these goals.",
)
@click.option(
    "--apply",
    "apply_",
    is_flag=True,
    help="Change the settings of the service, without a restart, measure again, and lower the rate until the "
    "goals hold. Works on the machine of the service only. The next `serve deploy` reverts the settings "
    "unless --write puts them into the config.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CONFIG",
    help="Put the settings into this config; its comments stay. The previous file is kept as CONFIG.before.",
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
    help="Draw the goals' figures against the load; needs saturate[plot].",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the random numbers. Another seed sends other prompts at other times.",
)
def tune(
    url: str,
    model: str | None,
    goals: tuple[Goal, ...],
    input: TokenLengths,
    output: TokenLengths,
    dataset: str | None,
    ledger: str | None,
    since: datetime | None,
    seconds: float,
    loop: Literal["both", "open", "closed"],
    rate: float | None,
    concurrency: int | None,
    beside_batch: bool,
    apply_: bool,
    write: Path | None,
    api_key_env: str | None,
    json_file: Path | None,
    plot: Path | None,
    seed: int,
) -> int:
    """Find the highest load that holds latency goals on the service at URL, and settings for it.

    The load is raised until a goal breaks, then the interval is bisected: about 15 steps of --seconds each.
    The service should have no other traffic and a fixed number of replicas. Answers other than 200 count as
    missed goals. Without --apply the service stays unchanged.

    \b
    How to choose:
      --goal       the times that your users notice: the first word (ttft), the pace (tpot)
      --ledger     the lengths of your own traffic, if the service keeps a ledger; else --dataset, or
                   --input and --output with known means and spreads
      --seconds    long enough for 300 requests per step, longer for a reliable p99
      --rate       with --apply: settings for your rate instead of the highest rate

    \b
    Exit codes:
      0  a load holds the goals
      1  there is no service, or it can't be measured
      2  an option is wrong; nothing was measured
      3  no load holds the goals (a lone request or --rate misses them), or the goals don't hold with the new
         settings; the output has the best load found

    \b
    Examples:
      saturate tune --goal "ttft_p99<0.5,tpot_p99<0.05" --input 512:256 --output 128:64
      saturate tune http://127.0.0.1:8000 --goal "ttft_p99<1" --dataset chats.jsonl --output 300 --apply
      saturate tune --goal "ttft_p99<0.5" --rate 8 --beside-batch --json beside.json
    """
    given = click.get_current_context().get_parameter_source
    others = [name for name in ("dataset", "input", "output") if given(name) is ParameterSource.COMMANDLINE]
    if ledger is not None and others:
        raise click.UsageError(f"--ledger: the ledger has the lengths; leave out --{others[0]}")
    if since is not None and ledger is None:
        raise click.UsageError("--since: needs --ledger")
    if beside_batch and rate is None:
        raise click.UsageError("--beside-batch: give the rate of the live traffic with --rate")
    if loop != "both" and (rate is not None or concurrency is not None):
        raise click.UsageError("--loop: leave it out; --rate and --concurrency measure one load")
    if apply_ and (beside_batch or loop == "closed" or (concurrency is not None and rate is None)):
        raise click.UsageError(
            "--apply: settings need the highest rate or --rate; leave out --beside-batch, --loop closed and "
            "--concurrency"
        )
    calls = None if ledger is None else read_calls(ledger, since or parse_time("7d"))
    try:
        if plot is not None:
            check_plot()
        prompts = [] if dataset is None else read_prompts(dataset)
    except (RunError, PlotError) as error:
        raise click.UsageError(
            f"{'--plot' if isinstance(error, PlotError) else '--dataset'}: {error}"
        ) from None
    if write is not None:
        read_config(write)
    check_folder("--json", json_file)
    check_folder("--plot", plot)
    question = TuneOptions(
        url=url,
        model=model,
        key=read_api_key(api_key_env),
        input=input,
        output=output,
        prompts=prompts,
        ledger=calls,
        goals=goals,
        seconds=seconds,
        loop=loop,
        rate=rate,
        concurrency=concurrency,
        seed=seed,
        beside_batch=beside_batch,
    )
    if calls is not None and (model or not calls):
        # Report a missing ledger entry before the service is contacted.
        question.requests(model or "any model")
    config = RunningConfig(url) if apply_ else None
    progress = Progress()
    run = TuneRun(question, config, progress)
    try:
        asyncio.run(run.run())
    except LoneMissError as error:
        run.found.lone = error.step
        _write_files(run, json_file, None)
        click.echo(f"No load: {error}.")
        _warn(run)
        return NO_PLAN
    except (ServiceError, click.ClickException, KeyboardInterrupt) as error:
        # The finished steps took minutes: show their results.
        if run.found.lone is not None:
            click.echo(text(run.found), nl=False)
            _warn(run)
            _write_files(run, json_file, None)
        if isinstance(error, ServiceError):
            raise click.ClickException(str(error)) from None
        raise
    found = run.found
    click.echo(text(found), nl=False)
    _warn(run)
    if write is not None and found.choice is not None:
        write_config(write, found.model, found.choice)
        click.echo(f"written to {write}; the previous config is {write.name}.before")
    _write_files(run, json_file, plot)
    return 0 if found.holds else NO_PLAN


def read_calls(place: str, since: datetime) -> dict[str, list[Tokens]]:
    """Return the lengths of the calls in a ledger, by model.

    Raises:
        click.UsageError: The ledger can't be read.
    """
    try:
        return LedgerFiles(place).lengths(since)
    except LedgerError as error:
        raise click.UsageError(f"--ledger: {error}") from None
    except OSError as error:
        raise click.UsageError(f"--ledger: {place}: {error.strerror or error}") from None


def read_prompts(dataset: str) -> Sequence[Prompt]:
    """Return the prompts of a dataset, at most 10,000.

    Raises:
        RunError: The dataset can't be read, is empty, or a row has no prompt.
    """
    prompts: list[Prompt] = []
    prompter: Callable[..., Prompt] | None = None
    for number, values in enumerate(islice(open_source(dataset).values(), MOST_PROMPTS), 1):
        try:
            if isinstance(values, RowError):
                raise values
            if prompter is None:
                chat = "prompt" not in values and "messages" in values
                prompter = Prompter(messages_column="messages" if chat else None).prompt
            prompts.append(prompter(values))
        except RowError as error:
            raise RunError(f"{dataset}, row {number}: {error}") from None
    if not prompts:
        raise RunError(f"{dataset} has no rows")
    return prompts


def _warn(run: TuneRun) -> None:
    for warning in run.found.warnings:
        click.echo(f"warning: {warning}", err=True)


def _write_files(run: TuneRun, json_file: Path | None, plot: Path | None) -> None:
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(body(run.found), indent=1) + "\n")
        if plot is not None:
            draw_tuning(run.found, plot)
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
