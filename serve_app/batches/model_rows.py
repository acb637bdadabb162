"""The rows of all batches at the engines of one model."""

import asyncio
from dataclasses import dataclass, field

from serve_app.batches.pacing import Concurrency
from serve_app.batches.places import Places
from serve_app.batches.rate import Rate
from serve_app.batches.sending import Sender


@dataclass(slots=True, eq=False)
class ModelRows:
    """The rows of all batches at the engines of one model, apart from those of the others.

    So a model that is slow or asleep holds up no batch of another.

    Attributes:
        concurrency: Limit on the rows that have a place, and on those of each tenant in flight.
        places: The places of the rows.
        sender: Sends the rows.
        rate: Rows that got their results.
        pacing: The task that adapts the limit to the load of the engines, while rows are in flight.
    """

    concurrency: Concurrency
    places: Places
    sender: Sender
    rate: Rate = field(default_factory=Rate)
    pacing: asyncio.Task[None] | None = None
