"""The command `saturate top`."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from serve_app.cli.api_key import read_api_key
from serve_app.cli.errors import service_errors
from serve_app.cli.option_values import parsed
from serve_app.client import Client, ServiceError, base_url
from serve_app.dataset.options import DEFAULT_URL

if TYPE_CHECKING:
    from rich.console import Console

DUMB = {"dumb", "unknown"}
"""Values of TERM for terminals without cursor control."""

WIDE = 160
"""Columns of the output to a file or a pipe, unless COLUMNS is set."""


@click.command()
@click.argument("url", default=DEFAULT_URL, callback=parsed(base_url))
@click.option(
    "--api-key-env",
    metavar="NAME",
    help="Environment variable that holds the API key; without `admin: true` the key sees only its tenant.",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.5, 3600),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two polls. Each poll asks every replica: use 5 or more for hundreds of replicas.",
)
@click.option("--once", is_flag=True, help="Print the figures once, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print GET /stats once, with its URL and time.")
def top(url: str, api_key_env: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Show live figures of the service at URL, by default http://127.0.0.1:8000.

    The figures come from GET /stats; rates are rates over the last two to three seconds. Ctrl-C ends the
    command. If the output is not a terminal, the command prints the figures once and exits, as with --once.

    \b
    running    running requests, and the most that may run at once
    waiting    requests in the queue, and by service tier
    KV cache   share that is reserved for the running requests and their answers
    tok/s      tokens in and out per second
    TTFT       seconds in a replica until the first token, of the last 512 streams
    wait       seconds in the queue, of the last 512 requests
    busy       share of the time in which a request ran

    Percentiles of a model with several replicas are the percentiles of its slowest replica. A narrow terminal
    shows fewer columns; the JSON has all figures.

    Exit codes: 0, also after Ctrl-C; 1 there is no service, or it refuses the key; 2 the command is wrong.

    \b
    Examples:
      saturate top
      saturate top https://llm.example.com --api-key-env LLM_KEY --interval 5
      saturate top --once --json | jq '.models | map_values(.total.running)'
    """
    with service_errors(), Client(url, read_api_key(api_key_env)) as client:
        if as_json:
            about = {"url": client.url, "time": datetime.now(UTC).isoformat(timespec="seconds")}
            print(json.dumps(about | client.stats().body(), indent=1, ensure_ascii=False))
        elif once or not sys.stdout.isatty() or os.environ.get("TERM") in DUMB:
            _print(client)
        else:
            _watch(client, interval)
    return 0


def _print(client: Client) -> None:
    from rich.console import Console

    from serve_app.cli.picture import picture

    columns = os.environ.get("COLUMNS", "")
    given = int(columns) if columns.isdigit() else WIDE
    console = Console(width=None if sys.stdout.isatty() else given)
    console.print(picture(client.url, datetime.now(UTC), client.stats(), console))


def _watch(client: Client, interval_s: float) -> None:
    # Both signals must raise, to restore the terminal at the end. Shell scripts ignore SIGINT in background
    # commands.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    watch(client, interval_s)


def watch(
    client: Client,
    interval_s: float,
    console: "Console | None" = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show a service until Ctrl-C. While the service is unreachable, the last figures stay, with the reason.

    Args:
        client: The service.
        interval_s: Seconds between two polls.
        console: The terminal; default: standard output.
        sleep: Waits a number of seconds.
        clock: Monotonic clock, in seconds.

    Raises:
        ServiceError: The first poll fails.
    """
    from rich.console import Console
    from rich.live import Live

    from serve_app.cli.picture import picture

    console = console or Console()
    with suppress(KeyboardInterrupt):
        stats, time_of, note, lost_at = client.stats(), datetime.now(UTC), "", 0.0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(client.url, time_of, stats, console, note), refresh=True)
                sleep(interval_s)
                try:
                    stats, time_of = client.stats(), datetime.now(UTC)
                    note = ""
                except ServiceError as error:
                    lost_at = lost_at if note else clock()
                    note = f"unreachable for {clock() - lost_at:.0f} s, the figures are old: {error.message}"
