"""Live picture of a service in a terminal."""

import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from serve_app.cli.picture import picture
from serve_app.cli.reading import view
from serve_app.cli.stats_client import Poll, StatsClient, StatsError


def watch(
    client: StatsClient,
    interval_s: float,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show a service until Ctrl-C. While it is away, the last picture stays, with the reason.

    Args:
        client: The service.
        interval_s: Seconds between two looks.
        console: The terminal; by default standard output.
        sleep: Waits some seconds.
        clock: Monotonic clock, in seconds.

    Raises:
        StatsError: The first look fails.
    """
    console = console or Console()
    with suppress(KeyboardInterrupt):
        first = client.poll()
        last: Poll | None = first
        shown, note, lost_at = view(client.url, first, None), "", 0.0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(shown, console, note), refresh=True)
                sleep(interval_s)
                try:
                    now = client.poll()
                except StatsError as error:
                    if last is not None:
                        lost_at = clock()
                    # Rates over the time in which the service was away would be wrong.
                    last = None
                    note = f"lost for {clock() - lost_at:.0f} s, the picture is old: {error.message}"
                    continue
                shown, note = view(client.url, now, last), ""
                last = now
