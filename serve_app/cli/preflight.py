"""Checks and preparations before a service starts."""

import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from serve_app.cli.errors import LaunchError
from serve_app.cli.runs import RunningService
from serve_app.ingress import haproxy
from serve_app.ingress.haproxy import LEAST_CONNECTIONS, open_files
from serve_app.system.private_files import close_to_others, new_private_file, token_file
from serve_app.system.ray_seams import (
    generate_new_authentication_token,
    get_ray_address_file,
    read_ray_address,
)

OPEN_FILES = open_files(LEAST_CONNECTIONS)
"""Least open files that HAProxy needs to start; more open files allow more connections."""


def check_port(host: str, port: int, runs: list[RunningService]) -> None:
    """Check that a service can listen on a port.

    Args:
        host: Address of the interface.
        port: The port.
        runs: The services of this machine, for the message.

    Raises:
        LaunchError: The port can't be used.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            for run in runs:
                if run.port == port:
                    raise LaunchError(
                        f"saturate already serves on port {port} (pid {run.launcher}); "
                        f"`saturate stop --port {port}` stops it"
                    ) from None
            raise LaunchError(
                f"port {port} on {host} can't be used ({error.strerror}); stop the program that uses it, or "
                "set http_options.port in the config (--port N for a model)"
            ) from None


def prepare_haproxy(environment: Mapping[str, str]) -> None:
    """Raise the limit of open files for HAProxy, and create the folders of its sockets.

    Args:
        environment: Environment of the controller.

    Raises:
        LaunchError: The limit can't be raised, or a folder can't be created.
    """
    allow_open_files(haproxy.connections(environment, allowed=-1))
    try:
        haproxy.make_folders(environment)
    except OSError as error:
        raise LaunchError(
            f"no place for HAProxy's sockets: {error}; or set {' and '.join(haproxy.SOCKETS)} to files in a "
            "folder of your own"
        ) from None


def allow_open_files(connections: int) -> None:
    """Raise the limit of open files for HAProxy, which exits at once with less than `OPEN_FILES`.

    Args:
        connections: Connections of HAProxy.

    Raises:
        LaunchError: HAProxy needs a higher limit than this process may set.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = open_files(connections)
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, wanted))
        return
    # HAProxy can run with fewer connections, down to `LEAST_CONNECTIONS`.
    if hard < (least := min(OPEN_FILES, wanted)):
        raise LaunchError(
            f"HAProxy needs {least:,} open files, and {hard:,} are allowed here; raise the limit "
            "(`ulimit -Hn 65536` as root, `LimitNOFILE=` of a systemd unit, `--ulimit nofile=65536` of a "
            "container)"
        )


def forget_dead_cluster() -> None:
    """Remove Ray's address file if its cluster is gone.

    A killed `ray start` leaves the file, and Ray would try for minutes to reach that cluster.
    """
    if "RAY_ADDRESS" in os.environ or not (address := read_ray_address()):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        Path(get_ray_address_file(None)).unlink(missing_ok=True)


def starts_ray() -> bool:
    """Return whether `serve run` will start its own Ray, rather than connect to a running Ray."""
    address = os.environ.get("RAY_ADDRESS") or read_ray_address() or "local"
    return address == "local"


def keep_token_private(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> None:
    """Create the file of Ray's token before Ray creates a file that all users of this machine can read.

    Args:
        environment: Environment variables.
        home: The home directory; None: this user's home.

    Raises:
        LaunchError: The file can't be created or made private.
    """
    file = token_file(environment, home)
    theirs = any(environment.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    try:
        if not theirs and environment.get("RAY_AUTH_MODE", "token") == "token":
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            close_to_others(file.parent)
            with suppress(FileExistsError):
                new_private_file(file, generate_new_authentication_token())
        close_to_others(file)
    except OSError as error:
        raise LaunchError(
            f"{file}, Ray's token, must be readable by this user only: {error.strerror}"
        ) from None
