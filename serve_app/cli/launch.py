"""Serves a config in the foreground: check, start, progress, stop."""

import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from serve_app.auth import bind_check
from serve_app.cli.config_text import completed
from serve_app.cli.dashboard import Dashboard
from serve_app.cli.errors import LaunchError
from serve_app.cli.log_tail import RequestLines
from serve_app.cli.preflight import (
    check_port,
    forget_dead_cluster,
    keep_token_private,
    prepare_haproxy,
    starts_ray,
)
from serve_app.cli.progress import Progress
from serve_app.cli.readiness import wait_ready
from serve_app.cli.runs import MARK, Run, find_runs, this_run
from serve_app.cli.serve_config import (
    answer_s,
    asks_for_keys,
    controller_environment,
    read_config,
    with_request_log,
)
from serve_app.cli.serve_run import ServeRun
from serve_app.cli.stop_signals import StopSignals
from serve_app.system.processes import adopt_orphans

STOP_S = 60.0
"""Seconds that Serve has to take applications down, beside those that answers may take."""


def launch(path: Path, *, verbose: bool, log_format: str | None = None) -> int:
    """Serve a config until SIGINT, SIGTERM or SIGHUP comes; return the exit code.

    Args:
        path: The config.
        verbose: Show the log of Ray, Serve and vLLM.
        log_format: Print a line per request, as "json" or as "text"; None: print none.

    Raises:
        LaunchError: The config is wrong, its port is taken, or the service fails.
    """
    config = read_config(path)
    host, port = config.http_options.host, config.http_options.port
    if warning := bind_check.warning(host, keys=asks_for_keys(config)):
        print(warning, file=sys.stderr)
    check_port(host, port, _end_leftovers())
    prepare_haproxy(controller_environment(config))
    forget_dead_cluster()
    own_ray = starts_ray()
    if own_ray:
        keep_token_private()
    adopt_orphans()
    signals = StopSignals()
    signals.catch()
    lines = RequestLines(_print) if log_format else None
    progress = Progress(live=not verbose)
    dashboard = Dashboard(port)
    with (
        tempfile.NamedTemporaryFile(prefix="saturate-", suffix=".log", delete=False) as log,
        tempfile.NamedTemporaryFile("w", prefix="saturate-", suffix=".yaml") as changed,
    ):
        text = path.read_text()
        whole = completed(text)
        if log_format:
            whole = with_request_log(whole, log_format)
        if whole != text:
            changed.write(whole)
            changed.flush()
            path = Path(changed.name)
        serve = ServeRun(
            path,
            None if verbose else log,
            own_ray=own_ray,
            environment={MARK: this_run(port).mark},
        )
        failed = False
        try:
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
            if wait_ready(serve.process, url, dashboard, progress, signals):
                progress.end(f"Ready: {url}  (Ctrl-C stops it)")
                if lines:
                    lines.start()
                while serve.process.poll() is None and not signals.wait(0.2):
                    pass
                if not signals.asked:
                    code = serve.process.returncode
                    raise LaunchError(f"`serve run` ended by itself, with exit code {code}")
                progress.end("Stopping; requests in flight are finished first (Ctrl-C cuts them off)")
                _take_down(dashboard, signals, STOP_S + answer_s(config))
            else:
                progress.end("Stopping")
        except LaunchError:
            failed = True
            progress.end("Stopping")
            if not verbose:
                progress.show_log(Path(log.name))
            raise
        finally:
            serve.end()
            if lines:
                lines.stop()
            if verbose or not failed:
                Path(log.name).unlink(missing_ok=True)
        progress.end("Stopped")
        return 0


def _end_leftovers() -> list[Run]:
    """End the processes of services whose launcher was killed; return the services that run."""
    runs = find_runs()
    for run in runs:
        if not run.alive and (ended := run.end()):
            print(
                f"Ended {len(ended)} processes of a killed service on port {run.port}",
                file=sys.stderr,
            )
    return [run for run in runs if run.alive]


def _take_down(dashboard: Dashboard, signals: StopSignals, patience_s: float) -> None:
    """Stop the applications, which `serve run` by itself would do without waiting for their answers."""
    if not dashboard.applications():
        return
    dashboard.take_down()
    deadline = time.monotonic() + patience_s
    while dashboard.applications() and not signals.at_once and time.monotonic() < deadline:
        time.sleep(0.1)


def _print(line: str) -> None:
    # The terminal may be closed.
    with suppress(OSError):
        sys.stdout.write(line)
        sys.stdout.flush()
