"""Garbage collection of a process that serves."""

import gc

THRESHOLDS = (5_000, 5, 20)
"""New objects before a collection of the youngest, and collections before one of the next generation.

A request makes some hundred objects, and with many under way a collection of the youngest finds most of them
in use. A full collection, which takes tens of milliseconds with 1,000 calls under way, comes after half a
million objects in place of 70,000. Ray Serve excludes the objects that exist when a replica is ready.
"""


def collect_rarely() -> None:
    """Make collections rare, in a process that makes many objects and few cycles."""
    gc.set_threshold(*THRESHOLDS)
