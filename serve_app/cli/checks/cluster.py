"""Check of a service's Ray cluster, without starting Ray."""

import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from serve_app.cli.checks.finding import CheckInput, Finding, ok, problem, warning
from serve_app.cli.dashboard import token_headers
from serve_app.client import ServiceError, connection

CONNECT_S = 5.0

DASHBOARD_PORT = 8265


def check_cluster(case: CheckInput, dashboard_port: int = DASHBOARD_PORT) -> Finding | None:
    """Check that the cluster can be reached, and has this machine's Ray version; None without a cluster."""
    address = case.address
    if not address:
        return None
    if address == "auto":
        note = Path(case.machine.environment.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        address = (case.machine.read(note) or "").strip()
        if not address:
            return problem(
                "RAY_ADDRESS is auto, and no Ray runs on this machine", "`ray start`, or unset RAY_ADDRESS"
            )
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None:
        return problem(
            f"{address!r} is not the address of a cluster",
            "give HOST:6379 of its head, ray://HOST:10001, or http://HOST:8265 of its dashboard",
        )
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        return problem(
            f"the cluster at {address} can't be reached ({reason})",
            "check the address and the network; `ray start --head` on the head starts one",
        )
    served = port if parts.scheme in {"http", "https"} else dashboard_port
    return _versions(case, address, f"http://{host}:{served}")


def _versions(case: CheckInput, address: str, dashboard: str) -> Finding:
    """Compare the Ray versions of the cluster and this machine."""
    here, there = case.machine.version("ray"), ""
    with suppress(httpx.HTTPError, ServiceError, ValueError, KeyError, TypeError):
        url = f"{dashboard}/api/version"
        answer = httpx.get(url, headers=token_headers(), timeout=CONNECT_S, **connection(url))
        there = str(answer.json()["ray_version"])
    if not there:
        return warning(
            f"the cluster at {address} answers, but its dashboard at {dashboard} doesn't report its version",
            "give --address http://HOST:PORT of the dashboard; compare `ray --version` by hand",
        )
    if there != here:
        return problem(
            f"the cluster at {address} has Ray {there}, and this machine has {here}",
            f"pip install 'ray[serve]=={there}' here, or {here} on every machine of the cluster",
        )
    return ok(f"{address} has Ray {there}")
