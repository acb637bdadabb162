"""The CPU scheduling policy of a process."""

import os
from contextlib import suppress

BACKGROUND_NICE = 19
"""The lowest priority with a share of a full CPU: 1.5 % beside one process of the usual priority."""

USUAL_NICE = 0
"""The priority that a process has by itself."""

RELAY_NICE = -10
"""Priority of a process on the way of live requests, where the system allows it: 9 times the usual share of a
full CPU, of which it takes little. Beside a batch on two cores its p99 falls by a sixth."""


def use_batch_scheduling(nice: int = USUAL_NICE) -> None:
    """Put all threads of this process under Linux's SCHED_BATCH, which doesn't preempt others on wake-up.

    A replica that relays pieces is woken thousands of times a second, and on a machine with few cores it
    would preempt the engine each time. Under SCHED_BATCH it gets the same share of CPU time in fewer, longer
    slices, each of which handles more messages. Child processes that run already keep their policy. On other
    systems than Linux this does nothing.

    Args:
        nice: Their priority, from -20, the first, to 19. Above the usual one it takes CAP_SYS_NICE; without
            it the priority stays as it is.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        # The thread may have ended meanwhile, or the container forbids the call.
        with suppress(ProcessLookupError, PermissionError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            if nice != USUAL_NICE:
                os.setpriority(os.PRIO_PROCESS, thread, nice)


def use_usual_priority(process: int) -> None:
    """Give a process that this one has just started the usual priority, not that of this one."""
    # It may have ended, or begin below the usual one without the right to leave that.
    with suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PROCESS, process, USUAL_NICE)
