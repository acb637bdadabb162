"""Clients of a service, as a program: python -m tests.k8s.clients URL. They run until a line comes in."""

import asyncio
import sys

from tests.e2e.load import Load
from tests.progress import STILL_S

BEFORE, AFTER = 10, 30
"""Requests that have to end well before it says that it is running, and once the line has come."""

LIMIT_S = STILL_S


async def main(url: str) -> int:
    """Send requests; print what became of them."""
    load = Load(url)
    await load.learn()
    async with load.running():
        await load.wait_for(BEFORE)
        print("running", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await load.wait_for(AFTER, LIMIT_S)
    print(load.summary(), flush=True)
    return 1 if load.failures() else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
