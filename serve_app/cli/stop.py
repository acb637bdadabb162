"""The command `saturate stop`."""

import signal
import time

import click

from serve_app.cli.runs import RunningService, find_runs
from serve_app.system.progress import Progress

NOW_S = 15.0
"""Seconds after which `--now` kills a launcher that still runs."""


@click.command()
@click.option("--port", type=int, metavar="N", help="Stop the service on this port only.")
@click.option("--all", "every", is_flag=True, help="Stop all services, if several run.")
@click.option("--now", is_flag=True, help="Cancel the requests in flight instead of finishing them.")
def stop(port: int | None, every: bool, now: bool) -> int:
    """Stop the services that `saturate serve` runs on this machine.

    Each service finishes its requests in flight first. The command returns when all processes of the services
    have ended, including processes left behind by a killed launcher. It finds the services of this user by a
    mark in the environment of their processes.

    Exit codes: 0 no service runs any more, or none ran; 2 the command is wrong.

    \b
    Examples:
      saturate stop
      saturate stop --port 8000
      saturate stop --all --now
    """
    runs = [run for run in find_runs() if port in (None, run.port)]
    living = [run for run in runs if run.alive]
    if len(living) > 1 and not every and port is None:
        places = ", ".join(f"port {run.port} (pid {run.launcher})" for run in living)
        raise click.UsageError(f"several services run: {places}; use --port or --all")
    if not runs:
        print(f"No service runs on port {port}" if port is not None else "No service runs")
    progress = Progress()
    for run in living:
        run.signal(signal.SIGINT if now else signal.SIGTERM)
    for run in runs:
        _finish(run, progress, now=now)
    return 0


def _finish(run: RunningService, progress: Progress, *, now: bool) -> None:
    """Wait for the end of a service, and end the processes left behind by its launcher."""
    deadline = time.monotonic() + NOW_S
    launched = run.alive
    while run.alive:
        progress.show(f"stopping the service on port {run.port} (pid {run.launcher})")
        time.sleep(0.2)
        if now:
            # Repeat the signal, since only the second SIGINT cancels the requests.
            run.signal(signal.SIGINT if time.monotonic() < deadline else signal.SIGKILL)
    ended = run.end()
    if launched:
        progress.end(f"Stopped the service on port {run.port}")
    elif ended:
        progress.end(f"Ended {len(ended)} processes of a killed service on port {run.port}")
