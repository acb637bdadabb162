"""Run the command `serve` with more time for Ray Serve's proxy to start.

    python -m serve_app.system.patient_serve SECONDS SERVE [ARGUMENT ...]

`serve run` waits 60 s for the proxy; the time is a constant of Ray Serve. An overloaded machine needs longer.
"""

import runpy
import sys

from serve_app.system.ray_seams import api, client

NAME = "HTTP_PROXY_TIMEOUT"
"""The constant; both modules import it."""


def main() -> None:
    """Run the command line."""
    wait_for_proxies(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def wait_for_proxies(seconds: int) -> None:
    """Set how long `serve run` waits for Ray Serve's proxies.

    Raises:
        AttributeError: This version of Ray keeps the constant elsewhere.
    """
    for module in (api, client):
        # Without this check, setting a constant that Ray has moved would silently have no effect.
        getattr(module, NAME)
        setattr(module, NAME, seconds)


if __name__ == "__main__":
    main()
