"""Ray Serve's log: what it holds back, and what a library does to it that sets up logging for itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler


@contextmanager
def preserved_handlers(name: str = "ray.serve") -> Iterator[None]:
    """Give a logger's buffered handlers their targets back when the block ends.

    vLLM calls `logging.config.dictConfig` when it starts, which closes every handler of the process. One that
    buffers has lost its target then: the replica's log ends there, and a Serve controller that starts anew
    asks in vain where that log is, and replaces the replica.

    Args:
        name: The logger.
    """
    handlers = _buffered(name)
    targets = [one.target for one in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            # A file that was closed opens again for the next record.
            handler.setTarget(target)


def flush_warnings(name: str = "ray.serve") -> None:
    """Have a logger's buffered handlers write warnings at once, and what came before them.

    With RAY_SERVE_THROUGHPUT_OPTIMIZED they hold a thousand records back, up to the next error. Nothing is
    logged for each request here, so the word that an engine has failed would stay there for days, or be lost.

    Args:
        name: The logger.
    """
    for handler in _buffered(name):
        handler.flushLevel = min(handler.flushLevel, logging.WARNING)


def _buffered(name: str) -> list[MemoryHandler]:
    return [one for one in logging.getLogger(name).handlers if isinstance(one, MemoryHandler)]
