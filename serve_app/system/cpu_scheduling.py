"""The CPU scheduling policy of a process."""

import os
from contextlib import suppress

BACKGROUND_NICE = 19
"""The lowest priority with a share of a full CPU: 1.5 % beside one process of the usual priority."""


def use_batch_scheduling(*, background: bool = False) -> None:
    """Put all threads of this process under Linux's SCHED_BATCH, which doesn't preempt others on wake-up.

    A replica that relays pieces is woken thousands of times a second, and on a machine with few cores it
    would preempt the engine each time. Under SCHED_BATCH it gets the same share of CPU time in fewer, longer
    slices, each of which handles more messages. Child processes that run already keep their policy. On other
    systems than Linux this does nothing.

    Args:
        background: Give them the lowest priority too: live requests and the engine go first.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        # The thread may have ended meanwhile, or the container forbids the call.
        with suppress(ProcessLookupError, PermissionError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            if background:
                os.setpriority(os.PRIO_PROCESS, thread, BACKGROUND_NICE)
