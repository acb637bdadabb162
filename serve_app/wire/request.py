"""An HTTP request as the Ingress sends it to an Engine."""

import time
from dataclasses import dataclass, field
from typing import Literal

from serve_app.api.facts import UNKNOWN, Facts, PickledByName
from serve_app.api.scheduling import DEFAULT_SCHEDULING, Scheduling
from serve_app.settings.usage import Quota

Source = Literal["http", "handle", "batch", "warm_up"]
"""Origin of a request: a client, a call of the handle, a row of a batch, or the warm-up of the replica."""


@dataclass(slots=True, frozen=True)
class RelayRequest(PickledByName):
    """An HTTP request as it crosses the deployment handle.

    Attributes:
        method: The HTTP method.
        path: The path, decoded.
        query: The query string.
        headers: Names, in lower case, and values.
        body: The whole body, unless `upload` is set.
        scheduling: What its headers and body state.
        arrived_at: When the Ingress got it, in seconds since the epoch: the clock that all machines share.
        resumes: It goes on with a stream that broke in another Engine.
        token_ids: The tokens that the stream had sent, as the bytes of an `array`.
        max_tokens: Maximum output tokens of an answer that states no limit of its own; None: the context.
        facts: What its body states.
        adapter: Id of the adapter that it names; empty: none.
        key: Name of its API key; empty: there is none, or it isn't known.
        quota: The quota of that key; None: it has none.
        source: Where it comes from.
        upload: Id under which the body comes in pieces, by calls of their own; empty: it is in `body`.
        charge: The load on its replica, for the router of this process; other processes get None.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    scheduling: Scheduling = DEFAULT_SCHEDULING
    arrived_at: float = field(default_factory=time.time)
    resumes: bool = False
    token_ids: bytes = b""
    max_tokens: int | None = None
    facts: Facts = UNKNOWN
    adapter: str = ""
    key: str = ""
    quota: Quota | None = None
    source: Source = "http"
    upload: str = ""
    charge: object = field(default=None, repr=False, compare=False)

    @property
    def age_s(self) -> float:
        """Seconds since the Ingress got it; never negative, since clocks of machines differ a little."""
        return max(0.0, time.time() - self.arrived_at)

    def scheduling_now(self) -> Scheduling:
        """Return the scheduling from now on: the time that it has waited elsewhere counts.

        A stream that goes on has started in time: it has no deadline any more.
        """
        scheduling = self.scheduling
        if scheduling.queue_timeout_s is None:
            return scheduling
        left = None if self.resumes else scheduling.queue_timeout_s - self.age_s
        return scheduling._replace(queue_timeout_s=left)
