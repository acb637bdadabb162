"""The command `saturate plan`."""

import json

import click

from serve_app.api.validation import suggestion
from serve_app.cli.option_values import parsed
from serve_app.simulation.profiles import PROFILES, Profile, read_profile
from serve_app.system.command_line import Number
from serve_app.system.home import below_home
from serve_app.system.progress import Progress
from serve_app.tuning.capacity import FitError, check_fit
from serve_app.tuning.fleet import MARGINS, Routing
from serve_app.tuning.goals import METRICS, Goal, parse_goals
from serve_app.tuning.report import Report
from serve_app.tuning.search import NoPlanError, Search
from serve_app.tuning.trials import Trials
from serve_app.tuning.workload import Lengths, Workload

NO_PLAN = 3
"""Exit code where no plan holds the goals."""

LINE_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def _device(value: str) -> Profile:
    """Return the profile of a name or of a file."""
    path = below_home(value)
    if value not in PROFILES and not path.is_file():
        known = suggestion(value, PROFILES, few="the devices are")
        raise ValueError(f"{value!r} is neither a device nor a file{known}")
    found: Profile = read_profile(value if value in PROFILES else str(path.absolute()))
    return found


@click.command()
@click.option(
    "--rate",
    type=Number(1e-6, 1e6),
    required=True,
    metavar="N",
    help="Requests per second in the busiest minutes, on average. They are taken to come independently of "
    "each other; traffic in bursts needs more than the plan says.",
)
@click.option(
    "--input",
    callback=parsed(Lengths.parse),
    required=True,
    metavar="TOKENS",
    help="Tokens of a prompt: a number, or MEAN:SPREAD for lognormal lengths with this mean and standard "
    "deviation. The ledger has both (`saturate usage`); a spread of half the mean is usual for chats.",
)
@click.option(
    "--output",
    callback=parsed(Lengths.parse),
    required=True,
    metavar="TOKENS",
    help="Tokens of an answer, in the same way.",
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
    "--device",
    required=True,
    metavar="NAME|FILE",
    help=f"Model and hardware of a replica: {', '.join(PROFILES)}, or a YAML or JSON file that "
    "`saturate profile` has measured.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="max_tokens of the requests: the batcher reserves KV cache for them, however long answers get. "
    "[default: that of --output; of lognormal answers the longest of 1,000]",
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
    type=click.Choice(list(MARGINS)),
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
    help="Most replicas that a plan may have.",
)
@click.option(
    "--price-per-hour",
    type=Number(0, 1e9),
    metavar="PRICE",
    help="Price of the GPUs of one replica per hour; adds the cost per hour and per million tokens.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Of the random numbers. Another seed shows by how much the figures depend on chance.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON for programs.")
def plan(
    rate: float,
    input: Lengths,
    output: Lengths,
    goals: tuple[Goal, ...],
    device: str,
    max_tokens: int | None,
    prefix_share: float,
    routing: Routing,
    max_replicas: int,
    price_per_hour: float | None,
    seed: int,
    as_json: bool,
) -> int:
    """Find the fewest replicas, and settings for them, with which latency goals hold.

    The answer comes from a model of the service in virtual time: router, batcher, vLLM's scheduler, and the
    times of a device. Nothing is started. It says what a device of this profile does; to know what yours
    does, measure its profile first with `saturate profile`.

    \b
    Exit codes:
      0  there is a plan
      2  an option is wrong, or requests don't fit the device
      3  no plan holds the goals; the best that was seen is shown

    \b
    Examples:
      saturate plan --rate 50 --input 1500 --output 300 --goal "ttft_p99<0.5,tpot_p99<0.05" --device h100-8b
      saturate plan --rate 4 --input 1500:800 --output 300:200 --goal "ttft_p99<2" --device l4-7b \\
        --price-per-hour 0.8 --prefix-share 0.5
      saturate plan --rate 20 --input 512 --output 128 --goal "latency_p95<6" --device my-gpu.yaml --json
    """
    workload = Workload.of(rate, input, output, max_tokens, prefix_share)
    try:
        profile = _device(device)
    except ValueError as error:
        raise click.UsageError(f"--device: {error}") from None
    try:
        check_fit(profile, workload)
    except FitError as error:
        raise click.UsageError(str(error)) from None
    trials = Trials(profile, workload, goals, seed, routing)
    report = Report(trials, price_per_hour)
    progress = Progress(every_s=LINE_S)
    try:
        found = Search(trials, max_replicas, lambda line: progress.show(f"trying {line}")).plan()
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
