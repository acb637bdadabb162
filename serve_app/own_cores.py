"""Cores that an engine shares with no other engine."""

import logging
import os
import socket
from contextlib import suppress

from serve_app.processes import descendants

logger = logging.getLogger("ray.serve")


class OwnCores:
    """Keeps the processes below this one to cores that no other engine on this machine keeps to.

    An engine's steps are long turns on a core, and all that happens around it short ones. Left alone, Linux
    moves the engine out of their way, to where the cache knows nothing of it; kept to its core, it is the
    others that go elsewhere. So one core at least stays nobody's.

    A core is claimed by the name of a socket, which goes when the process that has it ends, however it ends.
    Such names hold within a network namespace: containers on one machine don't see each other's, unless they
    use its network.

    Args:
        count: How many cores; 0: the engine runs wherever there is room.
        realm: Whose claims keep each other out.
    """

    def __init__(self, count: int, realm: str = "saturate") -> None:
        self._count = count
        self._realm = realm
        self._claims: list[socket.socket] = []

    def claim(self) -> None:
        """Take cores if there are enough that nobody has; without, or having them, do nothing.

        It may be called again and again: cores come free when the engine that has them ends.
        """
        if not self._count or self._claims or not hasattr(os, "sched_setaffinity"):
            return
        free = {core: claim for core in sorted(os.sched_getaffinity(0)) if (claim := self._take(core))}
        cores = list(free)[: self._count] if len(free) > self._count else []
        self._claims = [free.pop(core) for core in cores]
        for claim in free.values():
            claim.close()
        if cores:
            keep_to(cores)
            logger.info("the engine has core %s to itself", ", ".join(map(str, cores)))

    def _take(self, core: int) -> socket.socket | None:
        claim = socket.socket(socket.AF_UNIX)
        try:
            # A zero byte first: the name is in no directory.
            claim.bind(f"\0{self._realm}-core-{core}")
        except OSError:
            claim.close()
            return None
        return claim


def compute_threads() -> int:
    """Return with how many threads an engine computes that this process starts; Ray sets it to `num_cpus`."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    # OpenMP takes a list too, of which the first counts; without any number it takes every core.
    first = threads.partition(",")[0].strip()
    return int(first) if first.isdecimal() else os.cpu_count() or 1


def keep_to(cores: list[int]) -> None:
    """Keep all processes below this one to `cores`."""
    for process in descendants():
        # A process or thread may have ended meanwhile, or a container forbid the call.
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with suppress(OSError):
                    os.sched_setaffinity(int(thread), cores)
