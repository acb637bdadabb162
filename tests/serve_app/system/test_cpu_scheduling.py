"""The scheduling policy of a process, in a process of its own."""

import sys

import pytest

from serve_app.system.cpu_scheduling import BACKGROUND_NICE, RELAY_NICE, USUAL_NICE
from tests.progress import run

SCRIPT = """
import os, queue, subprocess, sys, threading
from serve_app.system.cpu_scheduling import use_batch_scheduling, use_usual_priority

end = threading.Event()
threading.Thread(target=end.wait, daemon=True).start()
before = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def found(process):
    return os.sched_getscheduler(process), os.getpriority(os.PRIO_PROCESS, process)

def raises(priority):
    try:
        os.setpriority(os.PRIO_PROCESS, before.pid, priority)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, before.pid, usual[1])
    return True

usual = found(0)
nice = int(sys.argv[1])
use_batch_scheduling(nice)
expected = os.SCHED_BATCH, nice if nice and (nice > usual[1] or raises(nice)) else usual[1]
policies = queue.SimpleQueue()
# The thread lives on: one that has ended is among the tasks for another moment, and can't be asked there.
threading.Thread(target=lambda: (policies.put(found(0)), end.wait()), daemon=True).start()
late = policies.get(timeout=30)
threads = {found(int(each)) for each in os.listdir("/proc/self/task")}
after = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
inherited = found(after.pid)[1]
use_usual_priority(after.pid)
given = 0 if raises(0) or inherited < 0 else inherited
print(threads == {expected}, late == expected, found(before.pid) == usual, found(after.pid)[1] == given)
before.communicate(b"\\n")
after.communicate(b"\\n")
end.set()
"""


@pytest.mark.parametrize("nice", [USUAL_NICE, BACKGROUND_NICE, RELAY_NICE])
def test_all_threads_of_this_process_and_no_other_have_the_policy(nice: int) -> None:
    done = run([sys.executable, "-c", SCRIPT, str(nice)])
    assert (done.stdout.split(), done.returncode) == (["True"] * 4, 0), done.stderr
