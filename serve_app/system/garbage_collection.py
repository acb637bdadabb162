"""Garbage collection of a process that serves."""

import gc

THRESHOLDS = (2_000, 5, 50)
"""New objects before a collection of the youngest, and collections before one of the next generation.

The two younger generations stay small, and a full collection, which takes tens of milliseconds with 1,000
calls under way, comes after half a million objects in place of 70,000.
"""


def quiet_collection() -> None:
    """Make full collections rare and short.

    The objects that exist now, such as modules and classes, are excluded from all later ones: a process with
    Ray in it has so many that a full collection holds it up for a tenth of a second. To be called once, when
    it is ready to serve.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
