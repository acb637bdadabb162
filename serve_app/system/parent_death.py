"""Ends a process when its parent ends, by the kernel's parent-death signal (Linux).

A killed Engine replica can't end its children, and an EngineCore that outlives it keeps the GPU's memory.
vLLM's processes call `tie_to_parent` by way of `serve_app.engine.vllm.plugin`.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

TIED = "SATURATE_TIED"
"""Set in an Engine replica and inherited by the processes it starts; other uses of vLLM stay as they are."""

_PR_SET_PDEATHSIG = 1


def tie_children() -> None:
    """Tie the vLLM processes that this one will start to it."""
    os.environ[TIED] = "1"


def tie_to_parent() -> None:
    """End this process when its parent ends, if an Engine replica started it."""
    parent = multiprocessing.parent_process()
    if TIED in os.environ and parent is not None and parent.pid is not None:
        end_with(parent.pid, signal.SIGKILL)


def end_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends; without effect except on Linux.

    Args:
        parent: The id of the parent. If it has ended already, this process exits at once.
        number: The signal.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before the call.
    if os.getppid() != parent:
        os._exit(1)
