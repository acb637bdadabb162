"""The base URL of a service, as a user gives it."""

from urllib.parse import urlsplit

import httpx


def base_url(url: str) -> str:
    """Return the base URL of a service, without a slash at its end.

    Args:
        url: The URL. The one that OpenAI's clients take ends in `/v1`, which is left out. An address
            without a scheme, such as localhost:8000, is one of HTTP.

    Raises:
        ValueError: It can't be that of a service; the message begins with it.
    """
    if url and "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url}: must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        # Its `port` raises for a port that doesn't exist, which httpx takes.
        named = bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"{url}: is no URL: {error}") from None
    if not named:
        raise ValueError(f"{url}: must have a host, and a port from 1 to 65535 if any")
    if parts.query or parts.fragment:
        raise ValueError(f"{url}: must have nothing behind the path")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
