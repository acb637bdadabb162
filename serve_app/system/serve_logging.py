"""Handlers of Ray Serve's log: flushing them, and keeping them while a library configures logging."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler


@contextmanager
def preserved_handlers(name: str = "ray.serve") -> Iterator[None]:
    """Restore the targets of a logger's buffered handlers when the block ends.

    vLLM calls `logging.config.dictConfig` when it starts, which closes every handler of the process. A closed
    buffered handler has no target: the replica's log ends there, and a restarted Serve controller, which
    asks the replica for its log's path in vain, replaces the replica.

    Args:
        name: The logger.
    """
    handlers = _buffered(name)
    targets = [one.target for one in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            # A closed file handler opens its file again for the next record.
            handler.setTarget(target)


def flush_warnings(name: str = "ray.serve") -> None:
    """Make a logger's buffered handlers flush at warnings.

    With RAY_SERVE_THROUGHPUT_OPTIMIZED they buffer up to a thousand log records, or until an error. Nothing
    is logged per request here, so a warning that an engine has failed could stay there for days, or be lost.

    Args:
        name: The logger.
    """
    for handler in _buffered(name):
        handler.flushLevel = min(handler.flushLevel, logging.WARNING)


def _buffered(name: str) -> list[MemoryHandler]:
    return [one for one in logging.getLogger(name).handlers if isinstance(one, MemoryHandler)]
