"""Services of this machine, found by the mark of their processes."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from serve_app.cli.runs import MARK, RunningService, find_runs, this_run
from tests.progress import STILL_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

LIMIT_S = STILL_S

DEAD = 2**22 + 1
"""An id that no process has: it is above the most that Linux gives."""

PORT = 100_000 + 2 * os.getpid()
"""Port of a service that only this run of the tests knows."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a marked process that lives until the end of the test, and says when it runs."""
    started: list[subprocess.Popen[str]] = []

    def start(mark: str, then: str = "input()") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", f"print('up', flush=True)\n{textwrap.dedent(then)}"],
            env={**os.environ, MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout
        # Until it runs a program of its own, the kernel shows the environment of this process.
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def killed(port: int) -> RunningService:
    """Return a service whose launcher is gone."""
    return RunningService(port, DEAD, 1, this_run(port).namespace)


def found(*ports: int) -> list[RunningService]:
    """Return the services on some ports; others may run on this machine."""
    return [run for run in find_runs() if run.port in ports]


def test_a_launcher_is_alive_while_its_id_and_start_time_are_those_of_a_process() -> None:
    mine = this_run(8000)
    assert mine.alive
    assert not RunningService(8000, os.getpid(), mine.started - 1, mine.namespace).alive
    assert not RunningService(8000, 2**22 + 1, mine.started, mine.namespace).alive


def test_a_launcher_that_is_gone_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    RunningService(8000, os.getpid(), 0, 0).signal(signal.SIGTERM)
    assert sent == []


def test_a_launcher_that_ends_before_its_signal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def kill(pid: int, number: int) -> None:
        asked.append(pid)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    this_run(8000).signal(signal.SIGTERM)
    assert asked == [os.getpid()]


@pytest.mark.parametrize("mark", ["", "8000", "a.b.c.d", "8000.1.1.1"])
def test_a_mark_of_another_form_or_namespace_is_passed_over(mark: str) -> None:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark}) as other:
        try:
            assert all(other.pid not in each.processes() for each in find_runs())
        finally:
            other.kill()


def test_services_are_found_by_the_marks_of_their_processes(start: Start) -> None:
    second, first = killed(PORT + 1), killed(PORT)
    # One run for all processes of a service; the order is that of the ports.
    processes = [start(second.mark), start(first.mark), start(second.mark)]
    assert found(PORT, PORT + 1) == [first, second]
    assert set(second.processes()) == {processes[0].pid, processes[2].pid}
    assert first.processes() == [processes[1].pid]


def test_a_process_whose_environment_is_lost_belongs_to_the_service_of_its_parent(start: Start) -> None:
    service = killed(PORT)
    parent = start(
        service.mark,
        """
        import subprocess
        child = subprocess.Popen(["env", "-i", "sh", "-c", "echo; read line"], stdout=-1, stdin=-1)
        child.stdout.readline()
        print(child.pid, flush=True)
        input()
        """,
    )
    assert parent.stdout
    child = int(parent.stdout.readline())
    assert service.processes() == [parent.pid, child]


def test_the_leftovers_of_a_killed_service_are_ended_and_no_others(start: Start) -> None:
    service, other = killed(PORT), killed(PORT + 1)
    left, stays = start(service.mark), start(other.mark)
    assert service.end() == [left.pid]
    assert left.wait(LIMIT_S) == -signal.SIGTERM
    assert found(PORT, PORT + 1) == [other]
    assert stays.poll() is None
    assert service.end() == []


def test_a_command_that_a_service_has_started_is_no_process_of_it(start: Start) -> None:
    """A shell in a process of a service may run `saturate stop`, which mustn't end itself."""
    service = killed(PORT)
    command = f"""
import os
from serve_app.cli.runs import find_runs
(run,) = [run for run in find_runs() if run.port == {PORT}]
print(os.getpid() in run.processes(), os.getppid() in run.processes())
"""
    parent = start(
        service.mark,
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {command!r}], timeout=120)\ninput()",
    )
    assert parent.stdout
    assert parent.stdout.readline() == "False True\n"
