"""Statistics of the demo model's batchers, and waiting for them."""

import time

import httpx

from tests.progress import STILL_S, wait_until


def batcher(http: httpx.Client) -> dict[str, float]:
    """Return the batcher's statistics of the one replica."""
    (replica,) = http.get("/stats").json()["models"]["demo"]["replicas"]
    stats: dict[str, float] = replica["batcher"]
    return stats


def running(http: httpx.Client) -> int:
    """Return the requests that run in all replicas of the demo model."""
    replicas = http.get("/stats").json()["models"]["demo"]["replicas"]
    return sum(replica["batcher"]["running"] for replica in replicas)


def wait_until_idle(http: httpx.Client, still_s: float = STILL_S) -> float:
    """Return the seconds until nothing runs or waits in the batcher; it fails if all stands still so long."""

    def is_idle() -> bool:
        stats = batcher(http)
        return not (stats["running"] or stats["queue_depth"])

    start = time.monotonic()
    wait_until(is_idle, still_s, tell=lambda: batcher(http), every_s=0.0)
    return time.monotonic() - start
