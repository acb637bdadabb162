"""The scheduling policy of a process, in a process of its own."""

import subprocess
import sys

SCRIPT = """
import os, subprocess, sys, threading
from serve_app.system.cpu_scheduling import use_batch_scheduling

start = threading.Event()
threading.Thread(target=start.wait, daemon=True).start()
before = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
usual = os.sched_getscheduler(0)
use_batch_scheduling()
late = []
thread = threading.Thread(target=lambda: late.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
threads = {os.sched_getscheduler(int(each)) for each in os.listdir("/proc/self/task")}
other = os.sched_getscheduler(before.pid)
print(threads == {os.SCHED_BATCH}, late == [os.SCHED_BATCH], other == usual)
before.communicate(b"\\n")
start.set()
"""


def test_all_threads_of_this_process_and_no_other_have_the_policy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True", "True"]
