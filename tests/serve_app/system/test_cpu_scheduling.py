"""The scheduling policy of a process, in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, subprocess, sys, threading
from serve_app.system.cpu_scheduling import use_batch_scheduling

start = threading.Event()
threading.Thread(target=start.wait, daemon=True).start()
before = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def found(process):
    return os.sched_getscheduler(process), os.getpriority(os.PRIO_PROCESS, process)

usual = found(0)
background = sys.argv[1] == "background"
use_batch_scheduling(background=background)
expected = os.SCHED_BATCH, 19 if background else usual[1]
late = []
thread = threading.Thread(target=lambda: late.append(found(0)))
thread.start()
thread.join()
threads = {found(int(each)) for each in os.listdir("/proc/self/task")}
print(threads == {expected}, late == [expected], found(before.pid) == usual)
before.communicate(b"\\n")
start.set()
"""


@pytest.mark.parametrize("kind", ["usual", "background"])
def test_all_threads_of_this_process_and_no_other_have_the_policy(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True", "True"]
