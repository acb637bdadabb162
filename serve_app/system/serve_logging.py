"""Flush Ray Serve's log handlers, and preserve them while a library configures logging."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler


@contextmanager
def preserved_handlers(name: str = "ray.serve") -> Iterator[None]:
    """Restore the targets of a logger's buffered handlers when the block ends.

    vLLM calls `logging.config.dictConfig` when it starts, which closes every handler of the process. A closed
    buffered handler has no target: the replica's log ends. A restarted Serve controller asks the replica for
    its log's path, gets no answer, and replaces the replica.

    Args:
        name: The logger.
    """
    handlers = _buffered(name)
    targets = [one.target for one in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            # A closed file handler reopens its file for the next log record.
            handler.setTarget(target)


def flush_warnings(name: str = "ray.serve") -> None:
    """Make a logger's buffered handlers flush at warnings.

    With RAY_SERVE_THROUGHPUT_OPTIMIZED the handlers buffer up to a thousand log records, or until an error.
    This project logs nothing per request, so a warning about a failed engine could stay in the buffer for
    days, or be lost.

    Args:
        name: The logger.
    """
    for handler in _buffered(name):
        handler.flushLevel = min(handler.flushLevel, logging.WARNING)


def _buffered(name: str) -> list[MemoryHandler]:
    return [one for one in logging.getLogger(name).handlers if isinstance(one, MemoryHandler)]
