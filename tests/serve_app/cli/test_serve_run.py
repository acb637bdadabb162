"""The process of `serve run`: what it gets, and its end.

Each script runs in a process of its own, since the end is that of all descendants.
"""

import sys
import textwrap
from pathlib import Path

import pytest

from tests import progress
from tests.progress import STILL_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

LIMIT_S = STILL_S

SERVE = """#!{python}
import os, signal, subprocess, sys, time
deaf = "trap '' INT HUP TERM; sleep 60 & echo; wait"
child = subprocess.Popen(["setsid", "--fork", "sh", "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
child.wait()
print(*sys.argv[1:], os.environ["RAY_worker_niceness"], os.environ.get("GIVEN"), os.getsid(0), flush=True)
try:
    {then}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {last}
    print("stopped", flush=True)
"""

HEAD = """
import os, signal, sys, time
from pathlib import Path
from serve_app.cli.serve_run import ServeRun
from serve_app.system.processes import adopt_orphans, descendants

# `serve` is looked for beside Python.
sys.executable = os.path.abspath("python")
adopt_orphans()

def start(own_ray=True, **environment):
    with open("log", "wb") as log:
        return ServeRun(Path("config.yaml"), log, own_ray=own_ray, environment=environment)

def lines(count):
    # Wait until the log has so many lines.
    deadline = time.monotonic() + 120
    while len(found := Path("log").read_text().splitlines()) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found
"""

SLEEP = "[time.sleep(0.05) for _ in range(1200)]"
"""A minute; a signal that comes right before a sleep is handled after it."""


def run(folder: Path, script: str, *, then: str = SLEEP, last: str = "pass", **environment: str) -> None:
    """Run a script with a `serve` of its own.

    Args:
        folder: Its working directory.
        script: The script.
        then: Statement of `serve` after its start.
        last: Statement of `serve` after an interrupt.
        environment: Environment variables of the script.
    """
    for name, text in (
        ("serve", SERVE.format(python=sys.executable, then=then, last=last)),
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    done = progress.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(script)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr


def test_it_has_the_given_environment_and_a_session_of_its_own(tmp_path: Path) -> None:
    script = """
        serve = start({given})
        command, path, niceness, given, session = lines(1)[0].split()[-5:]
        assert (command, path) == ("run", "config.yaml")
        assert (niceness, given) == {expected}
        # Ctrl-C on the terminal reaches neither it nor its supervisor.
        assert os.getsid(0) != os.getsid(serve.process.pid) != int(session)
        serve.end()
        """
    # Workers of Ray have the priority of other processes, unless the caller says otherwise.
    run(tmp_path, script.format(given="", expected=("7", "outer")), RAY_worker_niceness="7", GIVEN="outer")
    run(tmp_path, script.format(given="GIVEN='inner'", expected=("0", "inner")), GIVEN="outer")


def test_a_ray_of_its_own_gets_little_time_and_a_shared_one_gets_more(tmp_path: Path) -> None:
    script = """
        serve = start(own_ray={own})
        lines(1)
        begun = time.monotonic()
        serve.end()
        assert ("stopped" in lines(2)) is not {own}
        assert descendants() == []
        assert time.monotonic() - begun < 100
        """
    # Longer than a Ray of its own gets.
    run(tmp_path, script.format(own=True), last="time.sleep(1)")
    run(tmp_path, script.format(own=False), last="time.sleep(1)")
