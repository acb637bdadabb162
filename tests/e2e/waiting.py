"""Statistics of the demo model's batcher, and waiting for them."""

import time

import httpx


def batcher(http: httpx.Client) -> dict[str, float]:
    """Return the batcher's statistics of the one replica."""
    (replica,) = http.get("/stats").json()["models"]["demo"]["replicas"]
    stats: dict[str, float] = replica["batcher"]
    return stats


def wait_until_idle(http: httpx.Client, limit_s: float) -> float:
    """Return the seconds until nothing runs or waits in the batcher."""
    start = time.monotonic()
    while (stats := batcher(http))["running"] or stats["queue_depth"]:
        assert time.monotonic() - start < limit_s, f"still busy after {limit_s} s: {stats}"
    return time.monotonic() - start
