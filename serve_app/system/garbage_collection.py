"""Garbage collection of a process that serves."""

import gc


def freeze_heap() -> None:
    """Exclude the objects that exist now, such as modules and classes, from all later collections.

    A process with Ray in it has so many of them that a full collection holds it up for a tenth of a second.
    To be called once, when it is ready to serve.
    """
    gc.collect()
    gc.freeze()
