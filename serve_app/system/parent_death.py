"""End a process when its parent ends, by the kernel's parent-death signal (Linux).

A killed Engine replica can't end its children, and a surviving EngineCore keeps the GPU's memory.
`serve_app.engine.vllm.plugin` calls `tie_to_parent` in vLLM's processes.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

TIED = "SATURATE_TIED"
"""Set in an Engine replica and inherited by its child processes; other uses of vLLM are unaffected."""

_PR_SET_PDEATHSIG = 1


def tie_children() -> None:
    """Tie the vLLM processes that this process will start to this process."""
    os.environ[TIED] = "1"


def tie_to_parent() -> None:
    """End this process when its parent ends, if an Engine replica started it."""
    parent = multiprocessing.parent_process()
    if TIED in os.environ and parent is not None and parent.pid is not None:
        end_with(parent.pid, signal.SIGKILL)


def end_with(parent: int, number: signal.Signals) -> None:
    """Make the kernel send a signal to this process when its parent ends; only Linux supports this.

    Args:
        parent: The id of the parent. If the parent has already ended, this process exits at once.
        number: The signal.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before the call.
    if os.getppid() != parent:
        os._exit(1)
