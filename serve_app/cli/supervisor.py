"""Run a command, and end all its descendants when the command or the caller ends.

    python -m serve_app.cli.supervisor INTERRUPT_S COMMAND [ARGUMENT ...]

The caller holds the other end of standard input. When that end closes, because the caller closes it or has
died for any reason, the supervisor stops the command: SIGINT, INTERRUPT_S seconds later SIGTERM to every
descendant, and finally SIGKILL.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from serve_app.system.parent_death import end_with
from serve_app.system.processes import adopt_orphans, end_descendants, reap

GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL."""


def main() -> None:
    """Run the command line."""
    sys.exit(supervise(sys.argv[2:], interrupt_s=float(sys.argv[1])))


def supervise(command: Sequence[str], *, interrupt_s: float) -> int:
    """Run a command until it ends, standard input is closed, or SIGTERM comes.

    Args:
        command: The command; it runs in a new session.
        interrupt_s: Seconds for the command to end after SIGINT.

    Returns:
        The command's exit code; 128 + N if signal N ended the command.
    """
    adopt_orphans()
    signals, wakeup = os.pipe()
    os.set_blocking(signals, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    # SIGINT and SIGHUP are for the caller. Their handlers do nothing; the command would inherit SIG_IGN.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # If this process is killed, the command stops as on Ctrl-C. A `preexec_fn` is safe with one thread.
        preexec_fn=partial(end_with, os.getpid(), signal.SIGINT),
    )
    # `Popen` never waits for the child: `reap` collects its exit code.
    child = process.pid
    code = _wait(child, signals, None)
    if code is None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGINT)
        code = _wait(child, signals, interrupt_s)
    end_descendants(GRACE_S)
    if code is None:
        return 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


def _wait(child: int, signals: int, timeout_s: float | None) -> int | None:
    """Wait for the end of a child.

    Args:
        child: Process id of the child.
        signals: File descriptor that receives the number of each signal.
        timeout_s: Longest wait in seconds; None: until standard input is closed or SIGTERM comes.

    Returns:
        The child's exit code; None if the child still runs.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    watched = [signals] if deadline else [signals, 0]
    while True:
        codes = reap()
        if child in codes:
            return codes[child]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(watched, [], [], left)
        arrived = os.read(signals, 4096) if signals in ready else b""
        if deadline is None and (0 in ready or signal.SIGTERM in arrived):
            return reap().get(child)
        if not ready and left == 0:
            return None


if __name__ == "__main__":
    main()
