"""The command `saturate plan`."""

import json
import math
from dataclasses import replace
from typing import get_args

import click

from serve_app.api.validation import suggestion
from serve_app.cli.option_values import parsed
from serve_app.settings.fields import below_home
from serve_app.simulation.profiles import PROFILES, Profile, read_profile
from serve_app.system.command_line import Number
from serve_app.system.distribution import build
from serve_app.system.progress import Progress
from serve_app.tuning.fleet import Routing
from serve_app.tuning.goals import METRICS, Goal, batcher_goals, parse_goals
from serve_app.tuning.plan_report import PlanReport
from serve_app.tuning.planning import FitError, NoPlanError, Search, Trials, check_fit
from serve_app.tuning.workload import BatchWork, LengthError, StepGoals, TokenLengths, Workload

BOUND = 0.95
"""Goals that bound the steps of rows, as a share of the goals that are to hold."""

NO_PLAN = 3
"""Exit code if no plan holds the goals."""

LINE_S = 10.0
"""Seconds between two lines of progress without a terminal."""


def _device(value: str) -> Profile:
    """Return a profile by name, or from a file."""
    path = below_home(value)
    if value not in PROFILES and not path.is_file():
        known = suggestion(value, PROFILES, few="the devices are")
        raise ValueError(f"{value!r} is neither a device nor a file{known}")
    found: Profile = read_profile(value if value in PROFILES else str(path.absolute()))
    return found


def parse_batch(text: str) -> tuple[TokenLengths, TokenLengths]:
    """Return the lengths of rows' prompts and answers, from a text such as "512:256/128"."""
    input, slash, output = text.partition("/")
    if not slash:
        raise LengthError(f"{text!r} is not a batch; write PROMPT/ANSWER in tokens, as in 512:256/128")
    return TokenLengths.parse(input), TokenLengths.parse(output)


@click.command()
@click.option(
    "--rate",
    type=Number(1e-6, 1e6),
    required=True,
    metavar="N",
    help="Average requests per second in the busiest minutes. The plan assumes independent arrivals; bursts "
    "of traffic need more replicas.",
)
@click.option(
    "--input",
    callback=parsed(TokenLengths.parse),
    required=True,
    metavar="TOKENS",
    help="Tokens of a prompt: a number, or MEAN:SPREAD for lognormal lengths with this mean and standard "
    "deviation. The ledger has both (`saturate usage`); a spread of half the mean is usual for chats.",
)
@click.option(
    "--output",
    callback=parsed(TokenLengths.parse),
    required=True,
    metavar="TOKENS",
    help="Tokens of an answer, in the format of --input.",
)
@click.option(
    "--goal",
    "goals",
    callback=parsed(parse_goals),
    required=True,
    metavar="GOAL[,GOAL]",
    help=f"METRIC_PERCENTILE<SECONDS, as in ttft_p99<0.5. Metrics: "
    f"{'; '.join(f'{name}: {about}' for name, about in METRICS.items())}. People read at a tpot of 0.1.",
)
@click.option(
    "--batch",
    callback=parsed(parse_batch),
    metavar="TOKENS/TOKENS",
    help="Batch work beside these requests: tokens of a row's prompt and of its answer. There are "
    "always more rows; the plan says how many tokens per second they get while the goals hold.",
)
@click.option(
    "--batch-tokens",
    type=Number(0, 1e9),
    default="0",
    metavar="N",
    help="Tokens of answers per second that the batch needs, at least; the plan has replicas for them.",
)
@click.option(
    "--device",
    required=True,
    metavar="NAME|FILE",
    help=f"Model and hardware of a replica: {', '.join(PROFILES)}, or a YAML or JSON file that "
    "`saturate profile` has measured. h100-7b is measured; the others are estimates.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="max_tokens of the requests: the batcher reserves KV cache for that many tokens, even for short "
    "answers.  [default: --output; for lognormal answers the longest of 1,000]",
)
@click.option(
    "--prefix-share",
    type=Number(0, 1),
    default="0",
    show_default=True,
    metavar="SHARE",
    help="Share of a prompt, 0 to 1, that is in the prefix cache: a system prompt, earlier turns of a chat.",
)
@click.option(
    "--routing",
    type=click.Choice(get_args(Routing)),
    default="prefix",
    show_default=True,
    help="The model's `routing`.",
)
@click.option(
    "--max-replicas",
    type=click.IntRange(1, 100_000),
    default=256,
    show_default=True,
    metavar="N",
    help="Maximum replicas that a plan may have.",
)
@click.option(
    "--price-per-hour",
    type=Number(0, 1e9),
    metavar="PRICE",
    help="Price of the GPUs of one replica per hour, those of all its machines; adds the cost per hour and "
    "per million tokens.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the random numbers. Another seed shows how much the figures depend on chance.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON for programs.")
def plan(
    rate: float,
    input: TokenLengths,
    output: TokenLengths,
    goals: tuple[Goal, ...],
    batch: tuple[TokenLengths, TokenLengths] | None,
    batch_tokens: float,
    device: str,
    max_tokens: int | None,
    prefix_share: float,
    routing: Routing,
    max_replicas: int,
    price_per_hour: float | None,
    seed: int,
    as_json: bool,
) -> int:
    """Find the fewest replicas that hold latency goals, and settings for them.

    The service runs on a virtual clock: the choice of a replica, the batchers, and vLLM's engines, whose
    steps take the times of a device. No server is started. The answer holds for a device with this profile;
    for your device, measure its profile first with `saturate profile`.

    \b
    Exit codes:
      0  there is a plan
      1  vLLM is not installed
      2  an option is wrong, or requests don't fit the device
      3  no plan holds the goals; the output has the best plan found

    \b
    Examples:
      saturate plan --rate 50 --input 1500 --output 300 --goal "ttft_p99<0.5,tpot_p99<0.05" --device h100-7b
      saturate plan --rate 4 --input 1500:800 --output 300:200 --goal "ttft_p99<2" --device l4-7b \\
        --price-per-hour 0.8 --prefix-share 0.5
      saturate plan --rate 4 --input 256 --output 64 --goal "ttft_p99<0.3,tpot_p99<0.03" --device h100-7b \\
        --batch 512:256/128 --batch-tokens 4000
      saturate plan --rate 20 --input 512 --output 128 --goal "latency_p95<6" --device my-gpu.yaml --json
    """
    if batch_tokens and batch is None:
        raise click.UsageError("--batch-tokens: needs --batch, the lengths of the rows")
    workload = Workload.of(rate, input, output, max_tokens, prefix_share)
    if batch is not None:
        held = batcher_goals(goals)
        # A step at its bound is a little longer than predicted.
        bounds = StepGoals(*(BOUND * held.get(name, math.inf) for name in ("ttft_p99_s", "tpot_p99_s")))
        workload = replace(workload, batch=BatchWork(*batch, batch_tokens), goals=bounds)
    try:
        profile = _device(device)
    except ValueError as error:
        raise click.UsageError(f"--device: {error}") from None
    try:
        check_fit(profile, workload)
    except FitError as error:
        raise click.UsageError(str(error)) from None
    trials = Trials(profile, workload, goals, seed, routing)
    report = PlanReport(trials, price_per_hour)
    progress = Progress(every_s=LINE_S)
    try:
        found = Search(trials, max_replicas, progress.show).plan()
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise click.ClickException(
            f"vLLM is not installed, and a plan runs its scheduler; install {build('cpu')}"
        ) from None
    except NoPlanError as error:
        progress.end()
        if as_json:
            click.echo(json.dumps(report.no_plan(error), indent=1))
        else:
            click.echo(f"No plan: {error}.")
        return NO_PLAN
    progress.end()
    click.echo(json.dumps(report.body(found), indent=1) if as_json else report.text(found), nl=as_json)
    return 0
