"""The rows of all batches at the engines of one model."""

import asyncio
from dataclasses import dataclass, field

from serve_app.batches.pacing import Concurrency
from serve_app.batches.places import Places
from serve_app.batches.rate import Meter, Rate
from serve_app.batches.sending import Sender


@dataclass(slots=True, eq=False)
class ModelRows:
    """The rows of all batches at the engines of one model, apart from those of the others.

    So a model that is slow or asleep holds up no batch of another.

    Attributes:
        concurrency: Limit on the rows that have a place, and on those of each tenant in flight.
        places: The places of the rows.
        sender: Sends the rows.
        meter: Measures what the engines have room for.
        rate: Rows that got their results.
        full: Whether rows had about all places when places were given last.
        pacing: The task that adapts the limit to the load of the engines, while rows are in flight.
    """

    concurrency: Concurrency
    places: Places
    sender: Sender
    meter: Meter
    rate: Rate = field(default_factory=Rate)
    full: bool = False
    pacing: asyncio.Task[None] | None = None
