"""A service from start to stop, and its processes after every kind of end.

`serve run` is a stand-in with processes of the same shape: in sessions of their own, orphaned, and deaf.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli.launch import service_url
from serve_app.settings.completion import complete_config
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
    assert "demo: starting" in service.said
    assert "serve's own log" not in service.said
    # The supervisor, `serve`, and two shells with a `sleep` each in sessions of their own.
    assert len(service.processes()) == 6
    command = Path(f"/proc/{service.serve_run}/cmdline").read_text().split("\0")
    (path,) = (Path(word) for word in command if word.endswith(".yaml"))
    # The service runs the config with the variables that it leaves out.
    assert yaml.safe_load(path.read_text()) == complete_config(yaml.safe_load(service.config.read_text()))
    service.signal(number)
    # A second one doesn't break off the stop.
    service.hear("Stopping")
    service.signal(number)
    assert service.wait() == 0
    assert service.stopped_in_order
    assert service.processes() == []
    assert "Traceback" not in service.said
    assert service.logs() == []
    assert not path.exists()


def test_a_second_interrupt_cuts_off_requests_in_flight(start: Start) -> None:
    service = start(busy=True)
    service.hear_ready()
    service.signal(signal.SIGINT)
    service.hear("Stopping; requests in flight are finished first (Ctrl-C cuts them off)")
    service.signal(signal.SIGINT)
    # Without it the stop takes minutes.
    assert service.wait() == 0
    assert service.stopped_in_order
    assert service.processes() == []


def _beside_another_service(folder: Path) -> None:
    """Print requests beside errors, behind a proxy that is not there, where Ray's folder is in `folder`."""
    os.dup2(2, 1)
    os.environ["HTTP_PROXY"] = f"http://127.0.0.1:{free_port()}"
    os.environ["RAY_TMPDIR"] = str(folder)


def test_request_lines_are_of_this_service_since_its_start_and_need_no_proxy(
    start: Start, tmp_path: Path
) -> None:
    mine, other = (tmp_path / "ray" / session / "logs/serve" for session in ("mine", "other"))
    for folder in (mine, other):
        folder.mkdir(parents=True)
    (tmp_path / "ray/session_latest").symlink_to(tmp_path / "ray/other")
    (mine / "requests_old.log").write_text("a request before the start\n")
    os.utime(mine / "requests_old.log", (1, 1))
    arguments = ["--log-format", "text"]
    service = start(busy=True, arguments=arguments, before=partial(_beside_another_service, tmp_path))
    service.hear_ready()
    (other / "requests_a.log").write_text("a request to the other service\n")
    (mine / "requests_a.log").write_text("a request to this service\n")
    service.hear("a request to this service\n")
    service.signal(signal.SIGINT)
    service.hear("Stopping; requests in flight")
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
    "serve run": lambda service: service.kill(service.serve_run),
    "the supervisor": lambda service: service.kill(service.supervisor),
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
    killed.kill(killed.pid, killed.supervisor)
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


TRACE = """\
2026-11-27 10:00:00,000 ERROR scripts.py:600 -- Received unexpected error, see console logs for more details.
Traceback (most recent call last):
  File "scripts.py", line 580, in run
    serve.start()
    ^^^^^^^^^^^^^
{error}
"""
"""The end of the log of a `serve run` that fails."""


def test_a_start_that_is_too_slow_is_tried_once_more(start: Start) -> None:
    service = start(failures=[TRACE.format(error="TimeoutError: HTTP proxies not available after 60s.")])
    service.hear_ready()
    (line,) = [line for line in service.said.splitlines() if "trying again" in line]
    assert "] Ray Serve's proxy did not start within 60 s: " in line
    assert re.search(r"load \d+ on \d+ core", line)
    assert "Traceback" not in service.said
    service.signal(signal.SIGTERM)
    assert service.wait() == 0
    assert service.processes() == []
    assert service.logs() == []


def test_a_start_that_is_too_slow_twice_is_an_error_of_one_line_and_a_log(start: Start) -> None:
    trace = TRACE.format(error="TimeoutError: HTTP proxies not available after 60s.")
    service = start(failures=[trace, trace, "not a third time"])
    assert service.wait() == 1
    error, log = service.said.splitlines()[-2:]
    assert error.startswith("error: Ray Serve's proxy did not start within 60 s; a second try failed too: ")
    assert log == f"the log: {service.logs()[0]}"
    assert service.logs()[0].read_text().count("Traceback") == 2
    assert "Traceback" not in service.said
    assert service.processes() == []


def test_a_signal_after_a_start_that_was_too_slow_stops_the_second_one(start: Start) -> None:
    trace = TRACE.format(error="TimeoutError: HTTP proxies not available after 60s.")
    service = start(failures=[trace], before=_signal_with_the_retry)
    assert service.wait() == 0
    assert "Ready" not in service.said
    assert service.processes() == []


def _signal_with_the_retry() -> None:
    end = Progress.end

    def say(self: Progress, message: str = "") -> None:
        end(self, message)
        if message.endswith("trying again"):
            os.kill(os.getpid(), signal.SIGTERM)

    Progress.end = say  # type: ignore[method-assign]


def test_a_failed_start_says_the_last_error_and_names_the_log_with_the_stack(start: Start) -> None:
    service = start(failures=[TRACE.format(error="ValueError: no such thing")] * 2)
    assert service.wait() == 1
    (log,) = service.logs()
    error = "error: `serve run` failed, with exit code 3: ValueError: no such thing"
    assert service.said.splitlines()[-2:] == [error, f"the log: {log}"]
    assert "serve's own log" in log.read_text()
    # An error that the machine did not cause is not tried again.
    assert log.read_text().count("Traceback") == 1
    assert "Traceback" not in service.said


def test_the_option_verbose_shows_the_log_as_it_grows(start: Start) -> None:
    service = start(failures=[TRACE.format(error="ValueError: no such thing")], arguments=["--verbose"])
    assert service.wait() == 1
    assert "serve's own log\n" in service.said
    assert "Traceback" in service.said
    assert service.said.splitlines()[-1] == f"the log: {service.logs()[0]}"


def test_a_service_that_ends_by_itself_is_an_error_and_leaves_nothing(start: Start) -> None:
    service = start()
    service.hear_ready()
    service.kill(service.serve_run)
    assert service.wait() == 1
    assert "error: `serve run` ended by itself, with exit code 137: serve's own log\n" in service.said
    assert service.said.endswith(f"the log: {service.logs()[0]}\n")
    assert service.processes() == []


def _signal_while_serve_is_started() -> None:
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    subprocess.Popen = start  # type: ignore[assignment, misc]


def test_a_signal_while_serve_is_being_started_leaves_nothing(start: Start) -> None:
    service = start(before=_signal_while_serve_is_started)
    code = service.wait()
    assert service.processes() == []
    assert "Traceback" not in service.said
    assert code == 0


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
