"""Checks and preparations before a service starts."""

import os
import resource
import socket
from pathlib import Path

from ray._common.utils import get_ray_address_file
from ray._private.utils import read_ray_address

from serve_app.cli.errors import LaunchError
from serve_app.cli.runs import Run

OPEN_FILES = 10_300
"""Open files that HAProxy asks for at its start, for the connections that Serve configures."""


def check_port(host: str, port: int, runs: list[Run]) -> None:
    """Check that a service can listen on a port.

    Args:
        host: Address of the interface.
        port: The port.
        runs: The services of this machine, for the message.

    Raises:
        LaunchError: It can't.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            for run in runs:
                if run.port == port:
                    raise LaunchError(
                        f"a saturate serves on port {port} already (pid {run.launcher}); "
                        f"`saturate stop --port {port}` stops it"
                    ) from None
            raise LaunchError(
                f"port {port} on {host} can't be used ({error.strerror}); stop the program that uses it, or "
                "set http_options.port in the config (--port N for a model)"
            ) from None


def allow_open_files() -> None:
    """Raise the limit of open files to that of HAProxy, which ends at once with less.

    Raises:
        LaunchError: This process may not raise it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, OPEN_FILES))
    except (ValueError, OSError):
        raise LaunchError(
            f"HAProxy needs {OPEN_FILES:,} open files, and {hard:,} are allowed here; raise the limit "
            "(`ulimit -Hn 65536` as root, `LimitNOFILE=` of a systemd unit, `--ulimit nofile=65536` of a "
            "container)"
        ) from None


def forget_dead_cluster() -> None:
    """Remove Ray's note of a cluster on this machine that is gone.

    A killed `ray start` leaves the note, and Ray would try for minutes to reach that cluster.
    """
    if "RAY_ADDRESS" in os.environ or not (address := read_ray_address()):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        Path(get_ray_address_file(None)).unlink(missing_ok=True)


def starts_ray() -> bool:
    """Return whether `serve run` will start a Ray of its own, rather than connect to one that runs."""
    address = os.environ.get("RAY_ADDRESS") or read_ray_address() or "local"
    return address == "local"
