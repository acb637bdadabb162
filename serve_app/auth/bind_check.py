"""Warning about a service that is reachable from the network and needs no API key."""

from serve_app.settings.addresses import is_loopback
from serve_app.system.ray_seams import _get_global_client


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


def loopback_note(host: str | None, usual: str | None) -> str | None:
    """Return a note about a service on loopback where services usually are not; None: no note.

    Args:
        host: The address on which the service listens; None: unknown.
        usual: The address that services of a model get here; None: loopback.
    """
    if not usual or is_loopback(usual) or not is_loopback(host or ""):
        return None
    return (
        f"NOTE: this service listens on {host}, so in a container nothing outside of it can connect. Set "
        f"`http_options.host: {usual}` in the config (--host {usual} for a model)."
    )


def serve_host() -> str | None:
    """Return the address on which Ray Serve listens; None if Ray Serve doesn't run. Called in a replica."""
    # Ray Serve has no public API for its address.
    client = _get_global_client(raise_if_no_controller_running=False)
    return client.http_config.host if client else None
