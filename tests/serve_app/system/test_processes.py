"""Descendants of a process: finding and ending them, in any session.

Each script runs in a process of its own, since the functions act on all descendants.
"""

import subprocess
import sys
import textwrap

import pytest

from serve_app.system.processes import start_time
from tests import progress

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

HEAD = """
import os, signal, subprocess, sys, time
from serve_app.system.processes import adopt_orphans, descendants, end_descendants
from serve_app.system.processes import environment, reap, start_time

def start(script):
    # The child prints a line when it is set up.
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    return child, child.stdout.readline().split()

def alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
# Starts a child in a session of its own.
PARENT = '''
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {script!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
{then}
'''
STAYS = PARENT.format(script=SLEEPER, then="time.sleep(600)")
LEAVES = PARENT.format(script=SLEEPER, then="")
"""


def run(script: str) -> str:
    done = progress.run([sys.executable, "-c", HEAD + textwrap.dedent(script)])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_without_children_has_no_descendants() -> None:
    assert run("print(descendants(), end_descendants(5))") == "[] []\n"


def test_descendants_are_found_at_any_depth_and_in_any_session_parents_first() -> None:
    run("""
        child, (grandchild,) = start(STAYS)
        assert descendants() == [child.pid, int(grandchild)], descendants()
        end_descendants(5)
    """)


def test_all_descendants_are_ended_by_sigterm_and_returned() -> None:
    run("""
        adopt_orphans()
        child, (grandchild,) = start(STAYS)
        other, _ = start(SLEEPER)
        ended = end_descendants(5)
        assert sorted(ended) == sorted([child.pid, int(grandchild), other.pid])
        assert descendants() == []
        assert not any(map(alive, ended))
    """)


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    run("""
        child, _ = start(DEAF)
        begun = time.monotonic()
        assert end_descendants(0.2) == [child.pid]
        assert not alive(child.pid)
        assert time.monotonic() - begun >= 0.2
    """)


def test_the_grace_period_ends_with_the_last_process() -> None:
    run("""
        start(SLEEPER)
        begun = time.monotonic()
        end_descendants(1000)
        assert time.monotonic() - begun < 500
    """)


def test_orphans_are_adopted_and_ended() -> None:
    run("""
        adopt_orphans()
        child, (orphan,) = start(LEAVES)
        child.wait(120)
        assert descendants() == [int(orphan)]
        assert end_descendants(5) == [int(orphan)]
        assert not alive(orphan)
    """)


def test_without_adoption_orphans_are_lost() -> None:
    """The counterpart of `adopt_orphans`."""
    run("""
        child, (orphan,) = start(LEAVES)
        child.wait(120)
        assert descendants() == []
        os.kill(int(orphan), signal.SIGKILL)
    """)


def test_children_that_have_ended_are_collected_with_their_exit_codes() -> None:
    run("""
        reap()
        child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdout=subprocess.PIPE)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert descendants() == [child.pid]
        assert reap() == {child.pid: 3}
        assert descendants() == []
        assert reap() == {}
    """)


def test_a_process_is_named_by_its_id_and_start_time() -> None:
    run("""
        child, _ = start(SLEEPER)
        begun = start_time(child.pid)
        assert begun == start_time(child.pid) >= start_time(os.getpid())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(child.pid) is None, "a zombie doesn't run"
        child.wait(120)
        assert start_time(child.pid) is None
    """)


def test_the_environment_of_a_process_is_that_of_its_start() -> None:
    run("""
        program = [sys.executable, "-c", SLEEPER]
        child = subprocess.Popen(program, env={"A": "1=2", "B": ""}, stdout=subprocess.PIPE)
        # For a moment after it has begun, the kernel says that a program has no environment.
        child.stdout.readline()
        assert environment(child.pid) == {"A": "1=2", "B": ""}
        child.kill()
        child.wait(120)
        assert environment(child.pid) == {}
    """)


def test_a_process_whose_name_is_cut_inside_a_character_has_a_start_time() -> None:
    # PR_SET_NAME is 15.
    code = r"import ctypes, sys; ctypes.CDLL(None).prctl(15, b'mod\xc3', 0, 0, 0); print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        assert start_time(process.pid) is not None
