"""The CPU scheduling policy of a process."""

import os
from contextlib import suppress

BACKGROUND_NICE = 19
"""The lowest priority. On a full CPU its share is 1.5 % beside one process of the usual priority."""

USUAL_NICE = 0
"""The default priority of a process."""

RELAY_NICE = -10
"""Priority of a process that relays live requests, where the system allows it: 9 times the usual share of a
full CPU. The relay uses little of that share. Beside a batch on two cores its p99 falls by a sixth."""


def use_batch_scheduling(nice: int = USUAL_NICE) -> None:
    """Put all threads of this process under Linux's SCHED_BATCH, which doesn't preempt others on wake-up.

    A replica that relays pieces is woken thousands of times a second, and on a machine with few cores it
    would preempt the engine each time. Under SCHED_BATCH it gets the same share of CPU time in fewer, longer
    slices, and handles more messages per slice. Child processes that already run keep their policy. Only
    Linux has this policy; elsewhere the function does nothing.

    Args:
        nice: Priority of the threads, from -20 (highest) to 19. A value below 0 needs CAP_SYS_NICE; without
            CAP_SYS_NICE the priority stays unchanged.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        # The thread may have ended, or the container forbids the call.
        with suppress(ProcessLookupError, PermissionError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            if nice != USUAL_NICE:
                os.setpriority(os.PRIO_PROCESS, thread, nice)


def use_usual_priority(process: int) -> None:
    """Give a new child process the usual priority instead of its inherited priority."""
    # The process may have ended, or may lack the right to raise its priority.
    with suppress(ProcessLookupError, PermissionError):
        os.setpriority(os.PRIO_PROCESS, process, USUAL_NICE)
