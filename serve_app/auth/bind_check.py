"""Whether strangers can call a service that asks nobody for a key."""

import ipaddress

from ray.serve.context import _get_global_client


def warning(host: str | None, *, keys: bool) -> str | None:
    """Return what to warn of; None: there is nothing.

    Args:
        host: The address on which the service listens; None: nobody knows.
        keys: It asks for API keys.
    """
    if keys or _is_loopback(host or ""):
        return None
    where = host or "an unknown address"
    return (
        f"WARNING: this service listens on {where} and asks for no API key. Whoever reaches it can use its "
        "models. Set `access` in the config's args, or keep strangers out with the network around it."
    )


def serve_host() -> str | None:
    """Return the address on which Ray Serve listens, if there is one. To be called in a replica."""
    # Serve has no public name for it.
    client = _get_global_client(raise_if_no_controller_running=False)
    return client.http_config.host if client else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
