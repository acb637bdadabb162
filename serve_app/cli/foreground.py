"""Serve a config in the foreground: check, start, progress, stop.

Two processes: the launcher shows the progress and takes the signals, and its child, a fork, is the driver of
Ray. Each notices the end of the other at once, by a pipe, and ends all processes of the service: both adopt
the orphans among their descendants.
"""

import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, TextIO

import httpx
import psutil
from ray.serve.schema import ServeDeploySchema

from serve_app.auth import bind_check
from serve_app.cli.errors import LaunchError
from serve_app.cli.log_tail import LogLines
from serve_app.cli.preflight import (
    check_port,
    forget_dead_cluster,
    keep_token_private,
    prepare_haproxy,
    starts_ray,
)
from serve_app.cli.runs import MARK, RunningService, find_runs, this_run
from serve_app.cli.serve_config import (
    answer_s,
    asks_for_keys,
    controller_environment,
    own_variables,
    read_config,
    set_request_log,
)
from serve_app.client import Client, ServiceError
from serve_app.models.service import HOST_VARIABLE, service_url
from serve_app.stats import ServiceHealth
from serve_app.system import ray_seams
from serve_app.system.processes import KILL_S, adopt_orphans, end_descendants, reap
from serve_app.system.progress import Progress

STOP_S = 60.0
"""Seconds for Serve to take applications down, in addition to the time for answers."""

GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL."""

SHARED_RAY_S = 10.0
"""Seconds to take Serve down in a Ray that the service shares."""

HEALTH_S = 5.0
"""Timeout for an answer to `/health` on a busy machine, in seconds."""

SAY_S = 10.0
"""Seconds after which a start repeats what it waits for."""

MOST_SHOWN = 500
"""Maximum characters shown of an error."""


class Cluster(Protocol):
    """The parts that run a service, in the child process."""

    def start(self) -> Iterator[str]:
        """Start the service; yield the name of each part before it starts.

        Raises:
            Exception: The part can't start.
        """

    def failure(self) -> str:
        """Return the reason why the service can't become ready; empty while it may."""

    def request_logs(self) -> Path:
        """Return the folder of the request logs."""

    def take_down(self) -> None:
        """Stop the service; return when all requests are finished."""

    def leave(self) -> None:
        """Stop what doesn't end with the processes of the service."""


def launch(
    path: Path,
    *,
    verbose: bool,
    log_format: str | None = None,
    cluster: "Callable[[ServeDeploySchema], Cluster] | None" = None,
) -> int:
    """Serve a config until SIGINT, SIGTERM or SIGHUP comes; return the exit code.

    Args:
        path: The config.
        verbose: Show the log of Ray, Serve and vLLM.
        log_format: Print a line per request, as "json" or as "text"; None: no lines.
        cluster: Makes the cluster that runs the service; None: Ray.

    Raises:
        LaunchError: The config is wrong, its port is taken, or the service fails.
    """
    config = read_config(path)
    if log_format:
        set_request_log(config, log_format)
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
        for variable in own_variables(config):
            os.environ.setdefault(variable.name, variable.value)
    adopt_orphans()
    signals = StopSignals()
    signals.catch()
    with tempfile.NamedTemporaryFile(prefix="saturate-", suffix=".log", delete=False) as log:
        place = Path(log.name)
        service = _Service(
            (cluster or RayCluster)(config),
            service_url(host, port),
            this_run(port).mark,
            log,
            Progress(live=not verbose),
            signals,
        )
        shown = LogLines(partial(_print, sys.stderr), place.parent, place.name) if verbose else None
        if shown:
            shown.start()
        try:
            service.run(requests=bool(log_format), stop_s=STOP_S + answer_s(config))
        except LaunchError as error:
            raise LaunchError(f"{error.message}\nthe log: {place}") from None
        else:
            place.unlink(missing_ok=True)
        finally:
            if shown:
                shown.stop()
        return 0


# The launcher


class StopSignals:
    """Handlers for SIGINT, SIGTERM and SIGHUP in this process.

    Attributes:
        asked: Whether a signal has arrived.
        at_once: Whether a Ctrl-C has arrived after the first signal, to cancel the requests in flight.
        readable: A file descriptor that is readable once a signal has arrived.
    """

    def __init__(self) -> None:
        self.asked = False
        self.at_once = False
        self.readable, self._writable = os.pipe()

    def catch(self) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under `nohup` SIGHUP stays ignored, so that the service outlives the terminal. SIGINT, which
            # shell scripts ignore in background commands, is caught: `saturate stop --now` sends it.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        # Only Ctrl-C counts twice: a closed terminal sends SIGHUP twice, and process managers repeat SIGTERM.
        self.at_once |= self.asked and number == signal.SIGINT
        if not self.asked:
            self.asked = True
            os.write(self._writable, b"\0")


class _Service:
    """A service, seen by its launcher.

    Args:
        cluster: Runs the service.
        url: Address of the service.
        mark: Value of `MARK` for its processes.
        log: File for the output of the child.
        progress: Shows the stages.
        signals: The signals that stop the service.
    """

    def __init__(
        self,
        cluster: Cluster,
        url: str,
        mark: str,
        log: IO[bytes],
        progress: Progress,
        signals: StopSignals,
    ) -> None:
        self._url = url
        self._progress = progress
        self._signals = signals
        self._begun = [("the command", psutil.Process().create_time()), ("Ray", time.time())]
        self._logs: Path | None = None
        self._down = False
        self._waits_for = ""
        self._waits_since = 0.0
        self._channel, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if not self._child:
            self._channel.close()
            drive(cluster, theirs, mark, log)
        theirs.close()

    def run(self, *, requests: bool, stop_s: float) -> None:
        """Serve until a signal comes; all processes of the service have ended afterwards.

        Args:
            requests: Whether to print a line per request.
            stop_s: Seconds for the applications to stop.

        Raises:
            LaunchError: The service failed.
        """
        since = time.time()
        lines: LogLines | None = None
        try:
            if not self._wait_ready():
                self._progress.end("Stopping")
                return
            self._progress.end(f"Ready: {self._url}  (Ctrl-C stops it)")
            self._progress.say(self._times())
            if requests and self._logs:
                lines = LogLines(partial(_print, sys.stdout), self._logs, since=since)
                lines.start()
            # A signal may come right before the wait, which then doesn't end with it.
            while not self._hear(1.0):
                pass
            self._progress.end("Stopping; requests in flight are finished first (Ctrl-C cuts them off)")
            self._channel.send("take down")
            deadline = time.monotonic() + stop_s
            while not (self._down or self._signals.at_once) and time.monotonic() < deadline:
                # The pipe of the signals stays readable, so a second signal is seen by looking.
                self._receive(0.1)
        except LaunchError:
            self._progress.end("Stopping")
            raise
        finally:
            self._end()
            if lines:
                lines.stop()
        self._progress.end("Stopped")

    def _wait_ready(self) -> bool:
        """Wait until the service is ready; return whether it is, or False if a signal came first."""
        with Client(self._url, timeout=httpx.Timeout(HEALTH_S)) as client:
            while True:
                # Before its own Ingress is up, another program may answer.
                health = _health(client) if self._logs else ServiceHealth()
                if health.status == "ok":
                    self._begun.append(("", time.time()))
                    return True
                # Before the Ingress is up, HAProxy answers with an error.
                states = "; ".join(f"{name}: {health.model(name).state}" for name in health.models or ())
                self._show(states or f"starting {self._begun[-1][0]}")
                if self._hear(0.25 if self._logs else 1.0):
                    return False

    def _show(self, text: str) -> None:
        """Show what the start waits for, and every ten seconds for how long."""
        now = time.monotonic()
        if text != self._waits_for:
            self._waits_for, self._waits_since = text, now
        if seconds := int((now - self._waits_since) // SAY_S * SAY_S):
            text += f", for {seconds} s{_load()}"
        self._progress.show(text)

    def _times(self) -> str:
        """Return a line with the seconds of each part of the start."""
        parts = [f"{name} {end - begin:.0f} s" for (name, begin), (_, end) in itertools.pairwise(self._begun)]
        return f"Started in {self._begun[-1][1] - self._begun[0][1]:.0f} s: {', '.join(parts)}"

    def _hear(self, seconds: float) -> bool:
        """Wait for the child or a signal; return whether a signal has arrived.

        Raises:
            LaunchError: The service failed.
        """
        if not self._signals.asked and self._channel in wait(
            [self._channel, self._signals.readable], seconds
        ):
            self._receive(0.0)
        return self._signals.asked

    def _receive(self, seconds: float) -> None:
        """Read a message of the child, if one comes in time."""
        try:
            if not self._channel.poll(seconds):
                return
            kind, value = self._channel.recv()
        except (EOFError, OSError):
            code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
            ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise LaunchError(f"the process that runs Ray ended by itself, {ended}") from None
        match kind:
            case "starts":
                self._begun.append((value, time.time()))
            case "deployed":
                self._logs = value
            case "down":
                self._down = True
            case "failed":
                raise LaunchError(value)

    def _end(self) -> None:
        """End all processes of the service."""
        self._channel.close()
        deadline = time.monotonic() + SHARED_RAY_S + GRACE_S + KILL_S + 1.0
        with suppress(ProcessLookupError, ChildProcessError):
            while time.monotonic() < deadline and os.waitpid(self._child, os.WNOHANG) == (0, 0):
                time.sleep(0.02)
        # If the child was killed, this process has adopted its descendants.
        end_descendants(GRACE_S)


def _health(client: Client) -> ServiceHealth:
    """Return the service's health report; empty while the service can't be reached."""
    with suppress(ServiceError):
        return client.health()
    return ServiceHealth()


def _load() -> str:
    """Return a text about the load of the machine; empty if no process waits for a core."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f" (the machine is busy: load {load:.0f} on {cores} cores)" if load > cores else ""


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


def _print(stream: TextIO, line: str) -> None:
    # The terminal may be closed.
    with suppress(OSError):
        stream.write(line)
        stream.flush()


# The child


def drive(cluster: Cluster, channel: Connection, mark: str, log: IO[bytes]) -> NoReturn:
    """Run a service in this process, a fork of its launcher, until the launcher ends or closes its channel.

    Args:
        cluster: Runs the service.
        channel: The channel to the launcher.
        mark: Value of `MARK` for the processes of the service.
        log: File for the output.
    """
    try:
        # In a session of its own, Ctrl-C reaches only the launcher. Other processes would inherit SIG_IGN.
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        os.environ[MARK] = mark
        adopt_orphans()
        stop = threading.Event()
        threading.Thread(target=_end_with, args=(channel, cluster, stop), daemon=True).start()
        _run(cluster, channel.send, stop)
    except BaseException:
        # Nothing of the launcher's code may run in its fork. The output is the service's log.
        traceback.print_exc()
    os._exit(1)


def _run(cluster: Cluster, tell: Callable[[tuple[str, Any]], None], stop: threading.Event) -> None:
    """Start a service, report a failure of the start, and take the service down when the launcher asks."""
    try:
        for part in cluster.start():
            tell(("starts", part))
        tell(("deployed", cluster.request_logs()))
        while not stop.wait(1.0):
            # The replicas that die leave orphans. At the start Ray itself waits for its processes.
            reap()
            if reason := cluster.failure():
                tell(("failed", reason))
        cluster.take_down()
        tell(("down", None))
    except BaseException as error:
        # The launcher shows the reason, and the log has the stack.
        traceback.print_exc()
        tell(("failed", reason_of(error)))
    threading.Event().wait()


def _end_with(channel: Connection, cluster: Cluster, stop: threading.Event) -> None:
    """End this process and all its descendants with the launcher."""
    with suppress(EOFError, OSError):
        channel.recv()
        stop.set()
        channel.recv()
    leaving = threading.Thread(target=cluster.leave, daemon=True)
    leaving.start()
    leaving.join(SHARED_RAY_S)
    end_descendants(GRACE_S)
    os._exit(0)


class RayCluster:
    """Ray and Ray Serve.

    Args:
        config: The config.
        client: Client of Ray Serve; None: Ray and Serve are not started yet.
    """

    def __init__(self, config: ServeDeploySchema, client: Any = None) -> None:
        self._config = config
        self._own = starts_ray()
        self._client = client
        self._proxies: list[Any] = []
        self._ready = False

    def start(self) -> Iterator[str]:
        """Start Ray and Serve, and deploy the config; the models load while the proxies start."""
        import ray

        ray.init(namespace="serve")
        yield "Ray Serve"
        self._client = ray_seams._get_global_client(raise_if_no_controller_running=False)
        if self._client is None:
            config = self._config
            _, self._proxies = ray_seams.api._create_controller_and_proxy_refs(
                http_options=config.http_options.model_dump(),
                grpc_options=config.grpc_options.model_dump(),
                global_logging_config=None,
                global_tracing_config=None,
                controller_options=config.controller_options,
                proxy_location=config.proxy_location,
            )
            self._client = ray_seams._get_global_client()
        self._client.deploy_apps(self._config)
        yield "the models"

    def failure(self) -> str:
        """Return the errors of applications that can't start, or raise the error of a proxy."""
        import ray

        if self._ready:
            return ""
        done, self._proxies = ray.wait(self._proxies, timeout=0) if self._proxies else ([], [])
        ray.get(done)
        apps = self._client.get_serve_details()["applications"]
        self._ready = bool(apps) and all(app["status"] == "RUNNING" for app in apps.values())
        return "\n".join(
            f"the application {name!r} could not start: {_cause(app)}"
            for name, app in apps.items()
            if app["status"] == "DEPLOY_FAILED"
        )

    def request_logs(self) -> Path:
        """Return the folder of Serve's logs in the session of Ray."""
        return Path(ray_seams.worker._global_node.get_session_dir_path()) / "logs/serve"

    def take_down(self) -> None:
        """Delete the applications; return when their replicas have finished their requests."""
        self._client.deploy_apps(ServeDeploySchema(applications=[]))
        while self._client.get_serve_details()["applications"]:
            time.sleep(0.1)

    def leave(self) -> None:
        """Shut Serve down in a shared Ray."""
        if self._client is not None and not self._own:
            self._client.shutdown()


def reason_of(error: BaseException) -> str:
    """Return an exception as one line, without the stack of a process of Ray."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    last = _without_trace(text)
    first, *more = last.splitlines() or [""]
    # HAProxy's own lines follow: its version first, then the reason after "[ALERT]".
    alerts = [line.partition(":")[2].strip() for line in more if line.startswith("[ALERT]")]
    reason = ": ".join([first.partition("[NOTICE]")[0].rstrip(" :"), *alerts])
    # An error of another process has its type before it.
    return (reason if last != text.strip() else f"{type(error).__name__}: {reason}")[:MOST_SHOWN]


def _cause(app: dict[str, Any]) -> str:
    """Return the reason why an application failed: messages of its deployments, or else its own message."""
    causes = [
        f"{name}: {_without_trace(deployment['message'])}"
        for name, deployment in app.get("deployments", {}).items()
        if deployment["status"] != "HEALTHY" and deployment["message"]
    ]
    return "\n".join(causes) or _without_trace(app["message"])


def _without_trace(message: str) -> str:
    """Return the last error of a message, without the stack trace, which is in Ray's logs."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("    "), after))
