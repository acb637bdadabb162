"""HAProxy's configuration, as Ray Serve writes it, with what Ray Serve has no setting for.

- A limit of connections for each frontend and for each address of a client, and of seconds for a request.
- HTTP/1 alone: one connection of HTTP/2 would have a hundred requests at once, beside these limits.
- The methods that routes have: each method is a value in Ray Serve's metrics, and a client can invent any.
- No splicing: with it HAProxy 2.8 doesn't notice that a client disconnects while it waits for an answer.
- The body of a request in a buffer, so that the limit of seconds holds for the body too.
- The client's address in X-Forwarded-For, for API keys with `allow_from`.
- Statistics and metrics on loopback.
- The admin socket, which gives the listening sockets away, in a folder that only this user may enter.
- The status of errors of HAProxy and of Ray Serve, which mean that no replica is there, and Retry-After.

Ray Serve renders the configuration from a template, in one process per node. Ray calls `prepare`
(`serve_app.settings.environment`) in each of its processes before it loads any part of Ray Serve.
"""

import os
import re
import resource
from collections.abc import Mapping, MutableMapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any, NamedTuple

from serve_app.settings.environment import set_variables
from serve_app.system import ray_seams
from serve_app.system.private_files import close_session, close_to_others, private_folder, token_file

FOLDER = Path(f"/tmp/saturate-{os.geteuid()}")
"""Folder of HAProxy's files and sockets. Ray Serve and HAProxy add 80 bytes to a path, which may have 107."""

FILES: Mapping[str, Path] = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": FOLDER / "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": FOLDER / "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": FOLDER / "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": FOLDER,
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": FOLDER / "server-state",
}
"""Ray Serve's variables for them; its own defaults are in a folder that every user may read."""

SOCKETS = ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH")

PER_ADDRESS = "SATURATE_HAPROXY_CONNECTIONS_PER_ADDRESS"
TRUSTED = "SATURATE_HAPROXY_TRUSTED_PROXIES"
STATISTICS_HOST = "SATURATE_HAPROXY_STATISTICS_HOST"
REQUEST_S = "SATURATE_HAPROXY_REQUEST_TIMEOUT_S"
MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"

LEAST_CONNECTIONS = 4096
"""Connections that HAProxy has wherever it runs: Ray Serve's default."""

OWN_FILES = 100
"""Open files of HAProxy beside the two of each connection, one to the client and one to a replica."""

STATISTICS_CONNECTIONS = 100
"""Connections of each of the frontends for statistics and for metrics."""

RETRY_S = 5
"""Seconds after which a replica or HAProxy that was away is likely to be back."""


METHODS = "GET HEAD POST DELETE OPTIONS"
"""The methods of all routes, and of the preflights of pages of other origins."""


class ProxyLimits(NamedTuple):
    """The settings of HAProxy that Ray Serve doesn't have.

    Attributes:
        connections: Connections of all frontends together.
        per_address: Connections of a client's address, for IPv6 of its /64; 0: no limit.
        trusted: Addresses and ranges without that limit: proxies in front, which have many clients each.
        statistics_host: Address that statistics and metrics listen on.
        request_s: Seconds within which a request has to arrive, up to the size of HAProxy's buffer. A client
            that sends byte by byte loses its connection.
    """

    connections: int
    per_address: int
    trusted: tuple[str, ...] = ()
    statistics_host: str = "127.0.0.1"
    request_s: int = 30


def read_limits(environment: Mapping[str, str] = os.environ, allowed: int = -1) -> ProxyLimits:
    """Read the settings from environment variables.

    Args:
        environment: The variables.
        allowed: Files that HAProxy may open; -1: no limit.

    Raises:
        ValueError: One of them has a wrong value.
    """
    number = connections(environment, allowed)
    trusted = environment.get(TRUSTED, "").replace(",", " ").split()
    for one in trusted:
        try:
            ip_network(one, strict=False)
        except ValueError:
            raise ValueError(f"{TRUSTED}: {one!r} is not an address or a range such as 10.0.0.0/8") from None
    host = environment.get(STATISTICS_HOST) or "127.0.0.1"
    if not re.fullmatch(r"\*|[0-9A-Za-z.:-]+", host):
        raise ValueError(f"{STATISTICS_HOST}: {host!r} is not an address; take 127.0.0.1, or * for all")
    # One address can't take what all the others need.
    per_address = _number(environment, PER_ADDRESS, number // 4, 0)
    request_s = _number(environment, REQUEST_S, 30, 1)
    return ProxyLimits(number, per_address, tuple(trusted), host, request_s)


def connections(environment: Mapping[str, str], allowed: int) -> int:
    """Return the number of HAProxy's connections: as set, or as many as the open files allow.

    HAProxy ends at its start if it may not open the files for all of its connections.

    Args:
        environment: Environment variables.
        allowed: Files that HAProxy may open; -1: no limit.

    Raises:
        ValueError: The variable has a wrong value.
    """
    wanted = _number(environment, MAXCONN, LEAST_CONNECTIONS, 4 * STATISTICS_CONNECTIONS)
    if allowed < 0:
        return wanted
    return min(wanted, max(LEAST_CONNECTIONS, (allowed - OWN_FILES) // 2))


def open_files(connections: int) -> int:
    """Return the open files that HAProxy asks for at its start."""
    return 2 * connections + OWN_FILES


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Prepare a process of Ray: its environment, and HAProxy's template should it be a proxy.

    Raises:
        ValueError: A setting has a wrong value.
        PermissionError: The folder of the sockets belongs to another user.
        RuntimeError: Ray Serve is another version, or was loaded before.
    """
    close_to_others(token_file(environment))
    node: Any = ray_seams.worker._global_node
    if node is not None:
        close_session(Path(node.get_session_dir_path()))
    for name, path in FILES.items():
        environment.setdefault(name, str(path))
    make_folders(environment)
    set_variables(environment)
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = read_limits(environment, allowed)
    environment[MAXCONN] = str(limits.connections)
    templates: Any = ray_seams.haproxy_templates()
    templates.HAPROXY_CONFIG_TEMPLATE = with_limits(templates.HAPROXY_CONFIG_TEMPLATE, limits)


def make_folders(environment: Mapping[str, str]) -> None:
    """Make the folders of HAProxy's sockets; a folder that an operator has made stays as it is.

    Raises:
        PermissionError: The folder belongs to another user.
    """
    for name in SOCKETS:
        folder = Path(environment.get(name) or FILES[name]).parent
        if folder == FOLDER or not folder.exists():
            private_folder(folder)


def with_limits(template: str, limits: ProxyLimits) -> str:
    """Return Ray Serve's template of HAProxy's configuration with the limits and the status of errors.

    Raises:
        RuntimeError: It isn't the template of Ray 2.60, for which this is made.
    """
    host, few = limits.statistics_host, STATISTICS_CONNECTIONS
    guarded = "\n".join(("", *_frontend_lines(limits)))
    for old, new in (
        # Without `maxpipes` HAProxy would keep a file for each pipe of the splicing that is off.
        (
            "    maxconn {{ config.maxconn }}\n",
            "    maxconn {{ config.maxconn }}\n    nosplice\n    maxpipes 1\n",
        ),
        (
            "    option splice-request\n    option splice-response\n",
            "    option http-buffer-request\n    option forwardfor\n",
        ),
        (
            "    {% if config.timeout_http_request_s is not none %}"
            "timeout http-request {{ config.timeout_http_request_s }}s{% endif %}\n",
            f"    timeout http-request {limits.request_s}s\n",
        ),
        ("{{ config.socket_path }} mode 666 level", "{{ config.socket_path }} mode 600 level"),
        (
            "    bind :{{ config.metrics_port }}",
            f"    bind {host}:{{{{ config.metrics_port }}}}\n    maxconn {few}",
        ),
        ("  bind *:{{ config.stats_port }}", f"  bind {host}:{{{{ config.stats_port }}}}\n  maxconn {few}"),
        ("    bind {{ config.frontend_host }}:{{ config.frontend_port }}", guarded),
        ("    bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }} proto h2", guarded),
        ("listen stats\n", f"{_TABLE}listen stats\n"),
        (_RAYS_PAGES, ""),
        (_RAYS_NO_ROUTE, _NO_ROUTE),
    ):
        if template.count(old) != 1:
            raise RuntimeError(
                f"HAProxy's template of this version of Ray Serve lacks {old!r}; see {__file__}"
            )
        template = template.replace(old, old + new if new is guarded else new)
    return template


_TABLE = "backend saturate_addresses\n    stick-table type ipv6 size 100k expire 1m store conn_cur\n"


def _frontend_lines(limits: ProxyLimits) -> list[str]:
    lines = [
        f"    maxconn {limits.connections - 2 * STATISTICS_CONNECTIONS}",
        "    option disable-h2-upgrade",
    ]
    if limits.per_address:
        unless = f" unless {{ src {' '.join(limits.trusted)} }}" if limits.trusted else ""
        # A client of IPv6 has a whole /64.
        key = "src,ipmask(32,64)"
        lines += [
            f"    tcp-request connection track-sc0 {key} table saturate_addresses{unless}",
            f"    tcp-request connection reject if {{ sc0_conn_cur gt {limits.per_address} }}",
        ]
    unknown = f"if !{{ method {METHODS} }}"
    plain = "{ res.hdr(content-type) -m beg text/plain }"
    lines += [
        # Ray Serve counts the lines of the log.
        f"    http-request set-log-level silent {unknown}",
        "    http-request return status 405 content-type text/plain"
        f" string 'The methods of this service are {METHODS}.'"
        f" hdr allow '{METHODS.replace(' ', ', ')}' {unknown}",
        # Ray Serve's own pages are in plain text, errors of the Ingress in JSON. A 404 is of a proxy that
        # doesn't know the application yet, a 500 of a replica that died, and may have a stack.
        "    http-response return status 503 content-type text/plain"
        f" string '{_AWAY}' if {{ status 404 500 }} {plain}",
        # HAProxy's own 502 is a 503: another replica can take the request. A 502 of a replica stays.
        "    http-response set-var(txn.answered) bool(1)",
        "    http-after-response set-status 503 if { status 502 } !{ var(txn.answered) -m bool }",
        f"    http-after-response set-header retry-after {RETRY_S}"
        " if { status 503 } !{ res.hdr(retry-after) -m found }",
    ]
    return lines


def _number(environment: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name}: {text!r} is not a whole number of {least:,} or more")
    return int(text)


# Pages

_AWAY = "No replica of this service can take the request at this moment. Try again."

_RAYS_PAGES = """\
    {%- if config.error_file_path %}
    errorfile 502 {{ config.error_file_path }}
    errorfile 503 {{ config.error_file_path }}
    errorfile 504 {{ config.error_file_path }}
    {%- endif %}
"""
"""Ray Serve answers all three with a 500."""

_RAYS_NO_ROUTE = (
    """    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found. """
    """Ping http://.../-/routes for available routes."\n"""
)

# HAProxy knows no application after its start, until Serve's controller has told it.
_NO_ROUTE = (
    "    {%- if not backends %}\n"
    f'    http-request return status 503 content-type text/plain string "{_AWAY}"\n'
    "    {%- endif %}\n"
    f"{_RAYS_NO_ROUTE}"
)
