"""Garbage collection in a serving process."""

import gc

THRESHOLDS = (700, 2_000, 10)
"""Thresholds for `gc.set_threshold`: new objects, then collections, before the next generation is collected.

A collection blocks the process and visits all live objects of its generation: some 400 per running request.
Python subtracts freed objects from new objects. If requests begin and end at the same rate, a high threshold
lets the youngest generation grow until it holds the objects of all running requests: with 400 requests a
collection took 40 to 115 ms. With a low threshold it takes less than 1 ms.

The older generations hold hardly any garbage, and the time to collect them grows with the number of running
requests. They are collected once per some thousand requests. Ray Serve excludes the objects that exist when a
replica is ready.
"""


def collect_rarely() -> None:
    """Make long collections rare, for a process with many objects and few reference cycles."""
    gc.set_threshold(*THRESHOLDS)
