"""Serve a config in the foreground: check, start, progress, stop."""

import os
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TextIO

from serve_app.auth import bind_check
from serve_app.cli.config_text import completed
from serve_app.cli.dashboard import Dashboard
from serve_app.cli.errors import LaunchError, SlowStartError
from serve_app.cli.log_tail import LogLines, session_logs
from serve_app.cli.preflight import (
    check_port,
    forget_dead_cluster,
    keep_token_private,
    prepare_haproxy,
    starts_ray,
)
from serve_app.cli.readiness import last_error, wait_ready
from serve_app.cli.runs import MARK, RunningService, find_runs, this_run
from serve_app.cli.serve_config import (
    answer_s,
    asks_for_keys,
    controller_environment,
    read_config,
    with_request_log,
)
from serve_app.cli.serve_run import ServeRun
from serve_app.cli.stop_signals import StopSignals
from serve_app.models.service import HOST_VARIABLE
from serve_app.system.processes import adopt_orphans
from serve_app.system.progress import Progress

STOP_S = 60.0
"""Seconds for Serve to take applications down, in addition to the time for answers."""


def launch(path: Path, *, verbose: bool, log_format: str | None = None) -> int:
    """Serve a config until SIGINT, SIGTERM or SIGHUP comes; return the exit code.

    Args:
        path: The config.
        verbose: Show the log of Ray, Serve and vLLM.
        log_format: Print a line per request, as "json" or as "text"; None: no lines.

    Raises:
        LaunchError: The config is wrong, its port is taken, or the service fails.
    """
    config = read_config(path)
    host, port = config.http_options.host, config.http_options.port
    if warning := bind_check.warning(host, keys=asks_for_keys(config)):
        print(warning, file=sys.stderr)
    if note := bind_check.loopback_note(host, os.environ.get(HOST_VARIABLE)):
        print(note, file=sys.stderr)
    check_port(host, port, _end_leftovers())
    prepare_haproxy(controller_environment(config))
    forget_dead_cluster()
    if starts_ray():
        keep_token_private()
    adopt_orphans()
    signals = StopSignals()
    signals.catch()
    progress = Progress(live=not verbose)
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
        place = Path(log.name)
        shown = LogLines(partial(_print, sys.stderr), place.parent, place.name) if verbose else None
        if shown:
            shown.start()
        service = _Service(
            path, host, port, log, progress, signals, bool(log_format), STOP_S + answer_s(config)
        )
        failed = False
        try:
            try:
                service.run()
            except SlowStartError as error:
                progress.end(f"{error.message}: {_load()}; trying again")
                service.run(patient=True)
        except LaunchError as error:
            failed = True
            again = f"; a second try failed too: {_load()}" if isinstance(error, SlowStartError) else ""
            raise type(error)(f"{error.message}{again}\nthe log: {place}") from None
        finally:
            if shown:
                shown.stop()
            if not failed:
                place.unlink(missing_ok=True)
        progress.end("Stopped")
        return 0


class _Service:
    """A service that can be started again if its start is too slow.

    Args:
        config: The complete config.
        host: Address that the service listens on.
        port: Port that the service listens on.
        log: File for the output of `serve run`.
        progress: Shows the stages.
        signals: The signals that stop the service.
        requests: Whether to print a line per request.
        stop_s: Seconds for the applications to stop.
    """

    def __init__(
        self,
        config: Path,
        host: str,
        port: int,
        log: IO[bytes],
        progress: Progress,
        signals: StopSignals,
        requests: bool,
        stop_s: float,
    ) -> None:
        self._config = config
        self._url = service_url(host, port)
        self._port = port
        self._log = log
        self._progress = progress
        self._signals = signals
        self._requests = requests
        self._stop_s = stop_s

    def run(self, *, patient: bool = False) -> None:
        """Start the service, and serve until a signal comes.

        Args:
            patient: Whether the service gets more time to start.

        Raises:
            SlowStartError: Ray or Ray Serve did not start in time; all its processes have ended.
            LaunchError: The service failed; all its processes have ended.
        """
        progress, signals = self._progress, self._signals
        begin, since = Path(self._log.name).stat().st_size, time.time()
        requests: LogLines | None = None
        dashboard = Dashboard(self._port)
        serve = ServeRun(
            self._config,
            self._log,
            own_ray=starts_ray(),
            environment={MARK: this_run(self._port).mark},
            patient=patient,
        )
        try:
            if not wait_ready(
                serve.process,
                self._url,
                dashboard,
                progress,
                signals,
                log=lambda: self._said(begin),
                limits=serve.limits,
            ):
                progress.end("Stopping")
                return
            progress.end(f"Ready: {self._url}  (Ctrl-C stops it)")
            if self._requests:
                if not (session := dashboard.session()):
                    print("--log-format: no lines, as Ray's dashboard doesn't answer", file=sys.stderr)
                requests = LogLines(partial(_print, sys.stdout), session_logs(session), since=since)
                requests.start()
            while serve.process.poll() is None and not signals.wait(0.2):
                pass
            if not signals.asked:
                error = last_error(self._said(begin))
                raise LaunchError(
                    f"`serve run` ended by itself, with exit code {serve.process.returncode}"
                    f"{error and f': {error}'}"
                )
            progress.end("Stopping; requests in flight are finished first (Ctrl-C cuts them off)")
            _take_down(dashboard, signals, self._stop_s)
        except SlowStartError:
            raise
        except LaunchError:
            progress.end("Stopping")
            raise
        finally:
            serve.end()
            if requests:
                requests.stop()

    def _said(self, begin: int) -> str:
        """Return the log from a byte offset on."""
        return Path(self._log.name).read_bytes()[begin:].decode(errors="replace")


def service_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a service.

    Args:
        host: Address that the service listens on.
        port: Port that the service listens on.
    """
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{near}]' if ':' in near else near}:{port}"


def _load() -> str:
    """Return a text about the load of the machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    text = f"load {load:.0f} on {cores} core{'s' if cores > 1 else ''}"
    return f"the machine is busy ({text})" if load > cores else text


def _end_leftovers() -> list[RunningService]:
    """End the processes of services whose launcher was killed; return the running services."""
    runs = find_runs()
    for run in runs:
        if not run.alive and (ended := run.end()):
            print(
                f"Ended {len(ended)} processes of a killed service on port {run.port}",
                file=sys.stderr,
            )
    return [run for run in runs if run.alive]


def _take_down(dashboard: Dashboard, signals: StopSignals, patience_s: float) -> None:
    """Stop the applications and wait for their answers, unlike `serve run` itself."""
    if not dashboard.applications():
        return
    dashboard.take_down()
    deadline = time.monotonic() + patience_s
    while dashboard.applications() and not signals.at_once and time.monotonic() < deadline:
        time.sleep(0.1)


def _print(stream: TextIO, line: str) -> None:
    # The terminal may be closed.
    with suppress(OSError):
        stream.write(line)
        stream.flush()
