"""vLLM's processes end with the Engine that started them; other processes of vLLM don't."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serve_app.system.parent_death import TIED, tie_to_parent
from tests.progress import STILL_S, run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the tie is Linux'")

LIMIT_S = STILL_S

# The parent starts a child as vLLM starts its EngineCore. The child prints its id after the plugin, then
# answers each line on its input, which ends when this test closes it.
SCRIPT = """
import multiprocessing, os, sys
from serve_app.system.parent_death import tie_children, tie_to_parent

def child():
    stdin, stdout = os.fdopen({stdin}), os.fdopen({stdout}, "w")
    tie_to_parent()
    print(os.getpid(), file=stdout, flush=True)
    for line in stdin:
        print("alive", file=stdout, flush=True)

if {tied}:
    tie_children()
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
os.close({stdout})
process.join()
"""


class Child:
    """The child, seen through its pipes."""

    def __init__(self, questions: int, answers: int) -> None:
        self._questions = questions
        self._answers = answers

    def hear(self) -> str:
        """Return its next line; empty after its end."""
        readable, _, _ = select.select([self._answers], [], [], LIMIT_S)
        assert readable, "no output and no end"
        return os.read(self._answers, 100).decode()

    def ask(self) -> str:
        os.write(self._questions, b"?\n")
        return self.hear()


@contextmanager
def family(*, tied: bool) -> Iterator[tuple["subprocess.Popen[bytes]", Child]]:
    """Start a parent and its child."""
    stdin, questions = os.pipe()
    answers, stdout = os.pipe()
    script = SCRIPT.format(stdin=stdin, stdout=stdout, tied=tied)
    env = {name: value for name, value in os.environ.items() if name != TIED}
    parent = subprocess.Popen([sys.executable, "-c", script], pass_fds=(stdin, stdout), env=env)
    os.close(stdin)
    os.close(stdout)
    try:
        yield parent, Child(questions, answers)
    finally:
        os.close(questions)
        parent.kill()
        parent.wait(LIMIT_S)
        os.close(answers)


def test_a_tied_child_ends_when_its_parent_is_killed() -> None:
    with family(tied=True) as (parent, child):
        assert int(child.hear()) > 0
        assert child.ask() == "alive\n"
        parent.send_signal(signal.SIGKILL)
        assert child.hear() == ""


def test_other_uses_of_vllm_stay_as_they_are() -> None:
    with family(tied=False) as (parent, child):
        assert int(child.hear()) > 0
        parent.kill()
        parent.wait(LIMIT_S)
        assert child.ask() == "alive\n"


def test_a_child_whose_parent_has_died_before_the_tie_ends_itself() -> None:
    """A process in between, as with a fork server: multiprocessing's parent is not the kernel's."""
    script = f"""
import multiprocessing, os
from serve_app.system.parent_death import tie_children, tie_to_parent
tie_children()

def child():
    if os.fork() == 0:
        tie_to_parent()
        os._exit(7)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join({LIMIT_S})
print(process.exitcode)
"""
    done = run([sys.executable, "-c", script])
    assert done.stdout == "1\n", done.stderr


def test_a_process_without_a_multiprocessing_parent_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TIED, "1")
    tie_to_parent()
    # The kernel would have had this process end with the shell that started the tests.
    script = f"""
import ctypes, os, signal
from serve_app.system.parent_death import tie_to_parent
os.environ[{TIED!r}] = "1"
tie_to_parent()
number = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
print(number.value)
"""
    done = run([sys.executable, "-c", script])
    assert done.stdout == "0\n", done.stderr
