"""Garbage collection of a process that serves."""

import gc

THRESHOLDS = (700, 2_000, 10)
"""New objects before a collection of the youngest, and collections before one of the next generation.

Nothing else runs during a collection, and it looks at all objects of its generation that are in use: some
400 per request under way. Python subtracts the objects that are freed from those that are new. So with a high
threshold and as many requests that begin as end, the youngest generation grows until it holds all of them:
with 400 under way, a collection took 40 to 115 ms. With a low threshold it takes less than 1 ms.

The older generations hold hardly any garbage, and a collection of them takes as long as there are requests
under way. They come after some thousand requests. Ray Serve excludes the objects that exist when a replica
is ready.
"""


def collect_rarely() -> None:
    """Make long collections rare, in a process that makes many objects and few cycles."""
    gc.set_threshold(*THRESHOLDS)
