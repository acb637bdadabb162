"""A command under a supervisor: its exit code, and the end of its descendants."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.progress import STILL_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

LIMIT_S = STILL_S

# A signal that comes right before a sleep is handled after it, so sleeps are short.
SLEEP = "[time.sleep(0.1) for _ in range(600)]"

COMMAND = """
import os, signal, subprocess, sys, time
{first}
deaf = "trap '' INT HUP TERM; echo $$; sleep 60 & wait"
child = subprocess.Popen(["setsid", "--fork", "sh", "-c", deaf], stdout=subprocess.PIPE, text=True)
try:
    print(child.stdout.readline().strip(), flush=True)
    {then}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(4)
"""


class Supervised:
    """A supervisor, and its command seen through standard output."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.orphan = 0
        self._read = b""

    def hear(self) -> str:
        """Return the next line of the command."""
        assert self.process.stdout
        while b"\n" not in self._read:
            readable, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
            assert readable, "no output and no end"
            text = os.read(self.process.stdout.fileno(), 100)
            assert text, "the command has ended"
            self._read += text
        line, _, self._read = self._read.partition(b"\n")
        return line.decode().strip()

    @property
    def orphan_lives(self) -> bool:
        return Path(f"/proc/{self.orphan}/cmdline").exists() and bool(
            Path(f"/proc/{self.orphan}/cmdline").read_bytes()
        )


@contextmanager
def supervised(then: str = SLEEP, *, first: str = "", interrupt_s: float = LIMIT_S) -> Iterator[Supervised]:
    """Run a command that starts an orphan which ignores signals.

    Args:
        then: Statement of the command after that.
        first: Statement before.
        interrupt_s: Seconds that the command has to end after SIGINT.
    """
    command = [sys.executable, "-c", COMMAND.format(first=first, then=then)]
    with subprocess.Popen(
        [sys.executable, "-m", "serve_app.cli.supervisor", str(interrupt_s), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        found = Supervised(process)
        try:
            found.orphan = int(found.hear())
            assert found.orphan_lives
            yield found
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.kill(found.orphan, signal.SIGKILL)


def test_the_exit_code_is_that_of_the_command_and_nothing_is_left() -> None:
    with supervised("sys.exit(3)") as run:
        assert run.process.wait(LIMIT_S) == 3
        assert not run.orphan_lives


def test_a_killed_command_has_the_exit_code_of_a_shell() -> None:
    with supervised("os.kill(os.getpid(), 9)") as run:
        assert run.process.wait(LIMIT_S) == 128 + signal.SIGKILL
        assert not run.orphan_lives


def test_the_end_of_the_caller_interrupts_the_command() -> None:
    with supervised() as run:
        assert run.process.stdin
        run.process.stdin.close()
        assert run.hear() == "interrupted"
        assert run.process.wait(LIMIT_S) == 4
        assert not run.orphan_lives


def test_signals_of_a_terminal_are_for_the_caller() -> None:
    with supervised() as run:
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGHUP)
        run.process.terminate()
        assert run.hear() == "interrupted"
        assert run.process.wait(LIMIT_S) == 4


def test_a_command_that_ignores_the_interrupt_is_ended_after_its_time() -> None:
    begun = time.monotonic()
    with supervised(first="signal.signal(2, lambda *_: None)", interrupt_s=0.1) as run:
        assert run.process.stdin
        run.process.stdin.close()
        assert run.process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert not run.orphan_lives
    assert time.monotonic() - begun < LIMIT_S
