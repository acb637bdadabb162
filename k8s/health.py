#!/opt/venv/bin/python
"""HEALTHCHECK of the images: exit code 0 if the service in this container can answer.

The port is the port of the running service, which the config or `--port` sets.
"""

import sys
from urllib.request import ProxyHandler, build_opener

from serve_app.cli.runs import find_runs

TIMEOUT_S = 8.0
"""Seconds for the answer: less than the timeout of HEALTHCHECK in the Dockerfile."""


def main() -> int:
    """Ask each service of this container for its health, and print the answers."""
    runs = find_runs()
    if not runs:
        print("no service runs in this container")
        return 1
    # The container's proxy, if it has one, isn't for loopback.
    opener = build_opener(ProxyHandler({}))
    for run in runs:
        try:
            with opener.open(f"http://127.0.0.1:{run.port}/health", timeout=TIMEOUT_S) as answer:
                print(f"port {run.port}: {answer.read(1000).decode(errors='replace')}")
        except OSError as error:
            print(f"port {run.port}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
