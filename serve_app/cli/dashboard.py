"""Client for the Serve part of Ray's dashboard."""

import os
from contextlib import suppress

import httpx

from serve_app.api.protocol import JSON
from serve_app.system.private_files import token_file

DASHBOARD_PORTS = range(8265, 8275)
"""Ports of the dashboard, which takes the first free one."""

DASHBOARDS = [f"http://127.0.0.1:{port}/api/serve/applications/" for port in DASHBOARD_PORTS]
"""Possible URLs of the dashboard."""

KEPT = ("proxy_location", "http_options", "grpc_options", "target_capacity")
"""Parts of a config, beside the applications, that a PUT without them resets to their defaults."""


class Dashboard:
    """The dashboard of one service.

    Args:
        port: Port of the service, which identifies its dashboard if several Rays run on this machine.

    Attributes:
        url: Address of the dashboard; empty until it is found.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        # The dashboard is on loopback: no proxy, and no certificates, which take 20 ms to read.
        idle = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(trust_env=False, verify=False, limits=idle, timeout=10)
        self.url = ""

    def applications(self) -> JSON:
        """Return the state of each application; empty while the dashboard can't be reached."""
        for url in [self.url] if self.url else DASHBOARDS:
            details = self._ask(url, "GET")
            options = details.get("http_options")
            if isinstance(options, dict) and options.get("port") == self._port:
                self.url = url
                applications: JSON = details.get("applications", {})
                return applications
        return {}

    def config(self) -> JSON:
        """Return the running config in the form of a PUT; empty if it is unavailable.

        A PUT replaces all applications, so the config contains all applications.
        """
        if not self.applications():
            return {}
        details = self._ask(self.url, "GET")
        configs = [each.get("deployed_app_config") for each in details.get("applications", {}).values()]
        if not configs or not all(configs):
            return {}
        kept = {name: details[name] for name in KEPT if details.get(name) is not None}
        return kept | {"applications": configs}

    def deploy(self, config: JSON) -> str:
        """Deploy a config; return the reason if it is refused, or an empty text if the change has begun."""
        try:
            answer = self._http.put(self.url, json=config, headers=token_headers(), timeout=60)
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return "" if answer.is_success else f"{answer.status_code}: {answer.text[:500]}"

    def _ask(self, url: str, method: str, body: JSON | None = None) -> JSON:
        with suppress(httpx.HTTPError, ValueError):
            answer = self._http.request(method, url, json=body, headers=token_headers()).json()
            # Another program may listen on that port.
            if isinstance(answer, dict) and isinstance(answer.get("applications", {}), dict):
                return answer
        return {}


def token_headers() -> dict[str, str]:
    """Return the headers with the token for Ray's dashboard; empty without a token."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    with suppress(OSError):
        token = token or token_file().read_text().strip()
    return {"authorization": f"Bearer {token}"} if token else {}
