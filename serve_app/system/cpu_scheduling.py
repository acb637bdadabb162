"""The CPU scheduling policy of a process."""

import os


def use_batch_scheduling() -> None:
    """Put all threads of this process under Linux's SCHED_BATCH, which doesn't preempt others on wake-up.

    A replica that relays pieces is woken thousands of times a second, and on a machine with few cores it
    would preempt the engine each time. Under SCHED_BATCH it gets the same share of CPU time in fewer, longer
    slices, each of which handles more messages. Child processes that run already keep their policy. On other
    systems than Linux this does nothing.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
        except (ProcessLookupError, PermissionError):
            # The thread has ended meanwhile, or the container forbids the call.
            continue
