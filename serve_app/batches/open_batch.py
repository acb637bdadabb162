"""A batch that is being worked on."""

import asyncio
from collections import deque

from serve_app.batches.client import Answer
from serve_app.batches.plan import Unsent
from serve_app.batches.rows import Row
from serve_app.batches.stored import Batch


class OpenBatch:
    """A batch that hasn't ended, and what of it is in memory.

    Args:
        batch: Its stored state.

    Attributes:
        batch: Its state as far as it matters here; the store has the counts.
        base: The model whose engines run its rows; None: they have several, or it is not validated yet.
        rows: Rows that are read and not yet sent.
        unsent: The rows that aren't read; None: nobody has looked for them yet.
        read: Whether all rows were read.
        in_flight: Rows that were taken and have no committed result.
        due: Events of those of them whose next try is due, set once each has a place.
        busy: Whether something other than rows is under way: validation, reading, the end.
        resting: Whether that has failed, and waits to be tried again.
        stopping: Set when no row may be sent any more.
        tries: The tries of its rows that are under way.
        keyless_since: When its API key was first seen to hold no more; None: the key holds.
        lost: Message, if content is gone; the batch fails.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.base: str | None = None
        self.rows: deque[Row] = deque()
        self.unsent: Unsent | None = None
        self.read = False
        self.in_flight = 0
        self.due: deque[asyncio.Event] = deque()
        self.busy = False
        self.resting = False
        self.stopping = asyncio.Event()
        self.tries: set[asyncio.Future[Answer]] = set()
        self.keyless_since: float | None = None
        self.lost = ""

    @property
    def exhausted(self) -> bool:
        """True once all rows were taken."""
        return self.read and not self.rows

    @property
    def takes_rows(self) -> bool:
        """True while rows may be sent."""
        return self.batch.state == "in_progress" and not self.stopping.is_set()

    def abort(self) -> None:
        """End the tries that are under way, at the engines too; their rows have no result."""
        for one in self.tries:
            one.cancel()
