"""Facts of a body, without the body."""

from typing import Any

from serve_app.api.facts import Facts, RequestLimits, read


def inspect(body: bytes, path: str, limits: RequestLimits, **options: Any) -> Facts:
    """Return the facts of a request; see `read`."""
    return read(body, path, limits, **options)[0]
