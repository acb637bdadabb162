"""Live picture of a service in a terminal."""

import time
from collections.abc import Callable

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
    before: Poll | None = None
    last = client.poll()
    shown = view(client.url, last, None)
    lost_at: float | None = None
    note = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(shown, console, note), refresh=True)
                sleep(interval_s)
                try:
                    now = client.poll()
                except StatsError as error:
                    lost_at = clock() if lost_at is None else lost_at
                    note = f"lost for {clock() - lost_at:.0f} s, the picture is old: {error.message}"
                    continue
                # Rates over the time in which the service was away would be wrong.
                before, last = (None if lost_at is not None else last), now
                shown = view(client.url, now, before)
                lost_at, note = None, ""
    except KeyboardInterrupt:
        return
