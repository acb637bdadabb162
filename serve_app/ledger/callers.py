"""Rows of calls that were lost with their Engine, written by their callers."""

import asyncio

from serve_app.ledger.writer import Writer, new_book
from serve_app.settings.usage import UsageSettings
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage


class LostCalls:
    """Writes a row for each call that died with its Engine's process, which can't write the row.

    Args:
        settings: The config's `args.usage`.
        replica: The replica that calls.
    """

    def __init__(self, settings: UsageSettings, replica: str) -> None:
        self._book = new_book("", replica)
        self._writer = Writer(settings, self._book).start() if settings.ledger else None

    def add(self, model: str, request: RelayRequest) -> None:
        """Add a call.

        Args:
            model: Its model.
            request: The request.
        """
        if self._writer is not None:
            usage = RequestUsage(ran=True)
            self._book.open(request, usage, model).close("lost")

    async def stop(self) -> None:
        """Write the last rows."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.stop)
