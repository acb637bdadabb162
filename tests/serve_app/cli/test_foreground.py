"""A service from start to stop, and its processes after every kind of end.

Ray is a stand-in with processes of the same shape: in sessions of their own, orphaned, and deaf.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from serve_app.cli.foreground import RayCluster, StopSignals, reason_of
from serve_app.models.service import service_url
from serve_app.system.progress import Progress
from tests.ports import free_port
from tests.serve_app.cli.launching import Command, Service
from tests.serve_app.cli.services import config, write

Start = Callable[..., Service]


def test_wrong_args_end_the_command_at_once(tmp_path: Path) -> None:
    command = Command(tmp_path, str(write(tmp_path, config(ingress={"x": 1}))))
    assert command.wait() == 2
    assert "args.ingress.x: unknown key; `saturate schema` has them all" in command.said
    assert "Traceback" not in command.said


def test_a_taken_port_ends_the_command_at_once(tmp_path: Path, taken: int) -> None:
    command = Command(tmp_path, str(write(tmp_path, config(taken))))
    assert command.wait() == 1
    assert command.said.startswith(f"error: port {taken} on 127.0.0.1 can't be used (Address already in use)")
    assert "http_options.port" in command.said
    assert "Traceback" not in command.said
    assert command.processes() == []


def test_a_service_that_is_open_to_the_network_gets_a_warning(tmp_path: Path, taken: int) -> None:
    content = config(taken)
    content["http_options"]["host"] = "0.0.0.0"
    command = Command(tmp_path, str(write(tmp_path, content)))
    assert command.wait() == 1
    assert command.said.startswith("WARNING: this service listens on 0.0.0.0 and asks for no API key.")


def test_the_url_of_a_service_on_an_ipv6_address_has_brackets() -> None:
    hosts = ("::", "fd00::2", "0.0.0.0", "localhost")
    assert [service_url(host, 8000) for host in hosts] == [
        "http://[::1]:8000",
        "http://[fd00::2]:8000",
        "http://127.0.0.1:8000",
        "http://localhost:8000",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_service_in_order_and_leaves_nothing(start: Start, number: signal.Signals) -> None:
    # A closed terminal sends SIGHUP, see below.
    service = start()
    service.hear_ready()
    service.hear("Started in ")
    assert "demo: starting" in service.said
    assert "the log of Ray" not in service.said
    # The child, and two shells with a `sleep` each in sessions of their own.
    assert len(service.processes()) == 5
    service.signal(number)
    # A second one doesn't break off the stop.
    service.hear("Stopping")
    service.signal(number)
    assert service.wait() == 0
    assert service.stopped_in_order
    assert service.processes() == []
    assert "Traceback" not in service.said
    assert service.logs() == []


def test_a_second_interrupt_cuts_off_requests_in_flight(start: Start) -> None:
    service = start(busy=True)
    service.hear_ready()
    service.signal(signal.SIGINT)
    service.hear("Stopping; requests in flight are finished first (Ctrl-C cuts them off)")
    service.signal(signal.SIGINT)
    # Without it the stop takes minutes.
    assert service.wait() == 0
    assert not service.stopped_in_order
    assert service.processes() == []


def _behind_a_proxy() -> None:
    """Print requests beside errors, behind a proxy that is not there."""
    os.dup2(2, 1)
    os.environ["HTTP_PROXY"] = f"http://127.0.0.1:{free_port()}"


def test_request_lines_are_of_this_service_since_its_start_and_need_no_proxy(
    start: Start, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "requests_old.log").write_text("a request before the start\n")
    os.utime(logs / "requests_old.log", (1, 1))
    service = start(arguments=["--log-format", "text"], before=_behind_a_proxy, logs=logs)
    service.hear_ready()
    (logs / "requests_a.log").write_text("a request to this service\n")
    service.hear("a request to this service\n")
    service.signal(signal.SIGINT)
    assert service.wait() == 0
    assert service.said.count("a request ") == 1


def _close_terminal() -> None:
    """Close the read end of standard error with the first message of the stop."""
    end = Progress.end

    def closed(self: Progress, message: str = "") -> None:
        end(self, message)
        if message.startswith("Ready"):
            os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

    Progress.end = closed  # type: ignore[method-assign]


def test_a_closed_terminal_stops_the_service_in_order(start: Start) -> None:
    service = start(before=_close_terminal)
    service.hear_ready()
    service.signal(signal.SIGHUP)
    service.wait_gone()
    assert service.stopped_in_order


KILLS: dict[str, Callable[[Service], None]] = {
    "the launcher": lambda service: service.signal(signal.SIGKILL),
    "its child": lambda service: service.kill(service.child),
}


@pytest.mark.parametrize("killed", KILLS)
def test_sigkill_leaves_nothing(start: Start, killed: str) -> None:
    service = start()
    service.hear_ready()
    KILLS[killed](service)
    service.wait_gone()
    assert "Traceback" not in service.said


def test_a_service_ends_the_leftovers_of_a_killed_one(start: Start) -> None:
    killed = start()
    killed.hear_ready()
    killed.kill(killed.pid, killed.child)
    killed.wait()
    assert killed.processes("sleep")
    service = start()
    service.hear_ready()
    assert f"processes of a killed service on port {killed.port}" in service.said
    killed.wait_gone()


def test_a_second_service_on_one_port_names_the_first(start: Start, tmp_path: Path) -> None:
    service = start()
    service.hear_ready()
    second = Command(tmp_path, str(service.config))
    assert second.wait() == 1
    assert second.said == (
        f"error: saturate already serves on port {service.port} (pid {service.pid}); "
        f"`saturate stop --port {service.port}` stops it\n"
    )


def test_a_failed_start_says_its_error_and_names_the_log_with_the_stack(start: Start) -> None:
    service = start(failures=("no such thing",))
    assert service.wait() == 1
    (log,) = service.logs()
    assert service.said.splitlines()[-2:] == ["error: RuntimeError: no such thing", f"the log: {log}"]
    assert "the log of Ray" in log.read_text()
    assert log.read_text().count("Traceback") == 1
    assert "Traceback" not in service.said
    assert service.processes() == []


def test_the_option_verbose_shows_the_log_as_it_grows(start: Start) -> None:
    service = start(failures=("no such thing",), arguments=["--verbose"])
    assert service.wait() == 1
    assert "the log of Ray\n" in service.said
    assert "Traceback" in service.said
    assert service.said.splitlines()[-1] == f"the log: {service.logs()[0]}"


def test_a_service_that_ends_by_itself_is_an_error_and_leaves_nothing(start: Start) -> None:
    service = start(ends=True)
    assert service.wait() == 1
    assert "error: the process that runs Ray ended by itself, with exit code 7\n" in service.said
    assert service.said.endswith(f"the log: {service.logs()[0]}\n")
    assert service.processes() == []


def test_a_signal_during_the_start_leaves_nothing(start: Start) -> None:
    service = start(signals=True)
    assert service.wait() == 0
    assert service.processes() == []
    assert "Traceback" not in service.said
    assert "Ready" not in service.said


def _signal_while_another_is_handled() -> None:
    say = Progress.end

    def end(self: Progress, message: str = "") -> None:
        if message.startswith("Stopping"):
            os.kill(os.getpid(), signal.SIGTERM)
        say(self, message)

    Progress.end = end  # type: ignore[method-assign]


def test_a_signal_while_another_is_handled_does_not_break_off_the_stop(start: Start) -> None:
    service = start(before=_signal_while_another_is_handled)
    service.hear_ready()
    service.signal(signal.SIGINT)
    code = service.wait()
    assert service.stopped_in_order
    assert service.processes() == []
    assert "Traceback" not in service.said
    assert code == 0


HAPROXY = """\
\x1b[36mray::HAProxyManager.ready()\x1b[39m (pid=5, ip=10.0.0.1)
  File "haproxy.py", line 3, in ready
    self.start()
RuntimeError: HAProxy crashed during startup: [NOTICE]   (5) : haproxy version is 2.8.25
[ALERT]    (5) : Starting frontend stats: cannot bind socket [0.0.0.0:8404]
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (ValueError("x" * 1_000), f"ValueError: {'x' * 488}"),
        # The version of HAProxy is no reason.
        (
            RuntimeError(HAPROXY),
            "RuntimeError: HAProxy crashed during startup: Starting frontend stats: cannot bind socket "
            "[0.0.0.0:8404]",
        ),
    ],
)
def test_an_exception_is_told_on_one_line(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


class Client:
    """The client of a Serve with one application."""

    def __init__(self, app: dict[str, Any]) -> None:
        self._app = app

    def get_serve_details(self) -> dict[str, Any]:
        return {"applications": {"llm": self._app}}


TRACE = (
    'Traceback:\n  File "x.py", line 3, in __init__\n    load()\n    ^^^^^^\nOSError: no such model\n  at all'
)


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        (
            {
                "message": "failed",
                "deployments": {
                    "Ingress": {"status": "HEALTHY", "message": "fine"},
                    "Engine:demo": {"status": "DEPLOY_FAILED", "message": TRACE},
                },
            },
            "Engine:demo: OSError: no such model\n  at all",
        ),
        ({"message": "failed"}, "failed"),
    ],
)
def test_a_deployment_that_fails_is_reported_by_its_error_without_the_stack(
    app: dict[str, Any], reason: str
) -> None:
    cluster = RayCluster(ServeDeploySchema(applications=[]), Client(app | {"status": "DEPLOY_FAILED"}))
    assert cluster.failure() == f"the application 'llm' could not start: {reason}"


# Signals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signals = StopSignals()
    signals.catch()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", NUMBERS)
def test_an_interrupt_after_another_signal_is_impatient(signals: StopSignals, first: signal.Signals) -> None:
    os.kill(os.getpid(), first)
    assert signals.asked
    assert not signals.at_once
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.at_once


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_may_come_several_times(signals: StopSignals, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert signals.asked
    assert not signals.at_once


def test_a_service_under_nohup_outlives_its_terminal(signals: StopSignals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.catch()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not signals.asked
