"""What a process has started is known, wherever it went, and can be ended.

Each test's script runs in a process of its own: these functions act on all descendants.
"""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

HEAD = """
import os, signal, subprocess, sys, time
from serve_app.system.processes import adopt_orphans, descendants, end_descendants, reap

def start(script):
    # The child says when it is set up.
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    return child, child.stdout.readline().split()

def alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
# Starts a child in a session of its own.
PARENT = '''
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {script!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
{then}
'''
STAYS = PARENT.format(script=SLEEPER, then="time.sleep(60)")
LEAVES = PARENT.format(script=SLEEPER, then="")
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_who_has_started_nothing_has_no_descendants() -> None:
    assert run("print(descendants(), end_descendants(5))") == "[] []\n"


def test_descendants_are_found_at_any_depth_and_in_any_session_parents_first() -> None:
    run("""
        child, (grandchild,) = start(STAYS)
        assert descendants() == [child.pid, int(grandchild)], descendants()
        end_descendants(5)
    """)


def test_all_descendants_are_ended_by_sigterm_and_told() -> None:
    run("""
        adopt_orphans()
        child, (grandchild,) = start(STAYS)
        other, _ = start(SLEEPER)
        ended = end_descendants(5)
        assert sorted(ended) == sorted([child.pid, int(grandchild), other.pid])
        assert descendants() == []
        assert not any(map(alive, ended))
    """)


def test_what_does_not_hear_sigterm_is_killed() -> None:
    run("""
        child, _ = start(DEAF)
        begun = time.monotonic()
        assert end_descendants(0.2) == [child.pid]
        assert not alive(child.pid)
        assert time.monotonic() - begun >= 0.2
    """)


def test_nothing_waits_once_all_have_ended() -> None:
    run("""
        start(SLEEPER)
        begun = time.monotonic()
        end_descendants(25)
        assert time.monotonic() - begun < 10
    """)


def test_orphans_are_adopted_and_ended() -> None:
    run("""
        adopt_orphans()
        child, (orphan,) = start(LEAVES)
        child.wait(10)
        assert descendants() == [int(orphan)]
        assert end_descendants(5) == [int(orphan)]
        assert not alive(orphan)
    """)


def test_without_adoption_orphans_are_lost() -> None:
    """The counterpart that shows what `adopt_orphans` is for."""
    run("""
        child, (orphan,) = start(LEAVES)
        child.wait(10)
        assert descendants() == []
        os.kill(int(orphan), signal.SIGKILL)
    """)


def test_children_that_have_ended_are_collected() -> None:
    run("""
        reap()
        child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert descendants() == [child.pid]
        reap()
        assert descendants() == []
        reap()
    """)
