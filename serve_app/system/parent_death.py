"""Ties the life of vLLM's processes to the Engine that started them.

A killed Engine replica can't end its children, and an EngineCore that outlives it keeps the GPU's
memory. vLLM loads the entry points of the group `vllm.general_plugins` in each of its processes; ours
asks the kernel to end the process with its parent.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

TIED = "SATURATE_TIED"
"""Set in an Engine replica, and inherited by what it starts: other uses of vLLM stay as they are."""

_PR_SET_PDEATHSIG = 1


def tie_children() -> None:
    """Tie the vLLM processes that this one will start to it."""
    os.environ[TIED] = "1"


def tie_to_parent() -> None:
    """End this process when its parent ends, if an Engine replica started it."""
    parent = multiprocessing.parent_process()
    if TIED not in os.environ or parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the kernel knew of the tie.
    if os.getppid() != parent.pid:
        os._exit(1)
