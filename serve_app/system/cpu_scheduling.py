"""Who goes first on the CPU."""

import os


def use_batch_scheduling() -> None:
    """Keep this process from interrupting another whenever a message wakes it.

    A replica that passes pieces on is woken thousands of times a second, and on a machine with few cores it
    is the engine that it interrupts. Linux knows such work as SCHED_BATCH: it gets its share of the time, in
    fewer and longer turns, in which more of what has come is done at once. Processes that it has started
    keep their own way, and so do other systems than Linux.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
        except (ProcessLookupError, PermissionError):
            # It has ended meanwhile; or the container forbids the call.
            continue
