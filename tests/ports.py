"""Free ports of the loopback interface."""

import os
import random
import socket

FIRST, LAST = 24_000, 31_999
"""Ports for the tests: below those that Linux gives to connections, beside those of Ray and of `PORTS`."""

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
"""Two workers of pytest-xdist draw even and odd ports: neither knows what the other has given."""

_given: set[int] = set()


def free_port() -> int:
    """Return a port that nothing listens on, and that nothing but another run of tests takes meanwhile."""
    while True:
        port = random.randrange(FIRST + WORKER, LAST + 1, 2)
        if port not in _given and is_free(port):
            _given.add(port)
            return port


def is_free(port: int) -> bool:
    """Return whether nothing listens on a port."""
    with socket.socket() as probe:
        try:
            # On all interfaces: a server that listens on one of them has the port.
            probe.bind(("", port))
        except OSError:
            return False
    return True
