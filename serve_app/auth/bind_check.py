"""Warning about a service that is reachable from the network and needs no API key."""

from ray.serve.context import _get_global_client

from serve_app.settings.addresses import is_loopback


def warning(host: str | None, *, keys: bool) -> str | None:
    """Return the warning; None if the service listens on loopback only, or needs API keys.

    Args:
        host: The address on which the service listens; None: unknown.
        keys: Whether the service needs API keys.
    """
    if keys or is_loopback(host or ""):
        return None
    where = host or "an unknown address"
    return (
        f"WARNING: this service listens on {where} and asks for no API key. Every client that reaches it "
        "can use its models. Set `access` in the config's args, or restrict the network around it."
    )


def serve_host() -> str | None:
    """Return the address on which Ray Serve listens; None if Ray Serve doesn't run. Called in a replica."""
    # Ray Serve has no public API for its address.
    client = _get_global_client(raise_if_no_controller_running=False)
    return client.http_config.host if client else None
