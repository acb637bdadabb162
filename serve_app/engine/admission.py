"""Admission of a request: its demand on the batcher, and the outcome.

The request's task carries both in a context variable, since they pass through vLLM's own application.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from batcher import BatcherError, Expired, Oversize, QueueFull
from serve_app.api.errors import RequestError
from serve_app.api.scheduling import DEFAULT_SCHEDULING, Scheduling
from serve_app.engine.arrivals import Arrival
from serve_app.engine.grammars import Grammar
from serve_app.ledger.calls import Call
from serve_app.relay.resume import StreamTokens
from serve_app.relay.usage import RequestUsage


class AdmissionRequest(NamedTuple):
    """The demand of a request on the batcher.

    Attributes:
        scheduling: Its tier, tenant and times.
        deadline: When it must have started, on the clock of `time.monotonic`.
        wait: Wait for room when the queue is full, instead of being refused.
        token_ids: The tokens that its answer, a stream, has sent from another Engine already.
        max_tokens: Most output tokens of an answer that states no limit of its own.
        size: Bytes of its body; 0 where it came without one.
        adapter: Id of the adapter that it asks for; empty: none.
        arrived_at: When an Ingress got it, on the clock of `time.monotonic`; None: it isn't known.
        grammars: Grammars that its body states.
    """

    scheduling: Scheduling = DEFAULT_SCHEDULING
    deadline: float | None = None
    wait: bool = False
    token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    size: int = 0
    adapter: str = ""
    arrived_at: float | None = None
    grammars: tuple[Grammar, ...] = ()

    @property
    def share(self) -> str:
        """Name by which queues share the engine fairly."""
        return self.scheduling.share(self.adapter)


@dataclass(slots=True)
class AdmissionResult:
    """The outcome of a request's admission.

    Attributes:
        admitted: The batcher has let it into the engine.
        refusal: Why the batcher has refused it.
        usage: Tokens and times.
        stream: The tokens of its answer, if that is a stream which may go on in another Engine.
        asked: Slots that it has asked for: one for each prompt.
        texts: Texts that it has had tokenized, or that wait for it.
        searching: It is a beam search, whose slot covers all that it asks of the engine.
        call: The call that the ledger has for it; None: none is kept.
        arrival: Its place among those that have no slot yet; None: it goes at once.
        constrained: The engine holds its answer to a grammar.
        failure: The error that an exception in vLLM's application makes for its client.
        fault: That exception, if it is the service's fault.
    """

    admitted: bool = False
    refusal: RequestError | None = None
    usage: RequestUsage = field(default_factory=RequestUsage)
    stream: StreamTokens | None = None
    asked: int = 0
    texts: int = 0
    searching: bool = False
    call: Call | None = None
    arrival: Arrival | None = None
    constrained: bool = False
    failure: RequestError | None = None
    fault: Exception | None = None

    def ask(self) -> None:
        """Note that it asks for a slot."""
        self.asked += 1
        if self.arrival is not None:
            self.arrival.end()


class Admission(NamedTuple):
    """The admission of one request."""

    request: AdmissionRequest
    result: AdmissionResult


_current: ContextVar[Admission | None] = ContextVar("admission", default=None)


def set_current(request: AdmissionRequest, result: AdmissionResult) -> None:
    """Set the admission of the running task, and of those that it starts."""
    _current.set(Admission(request, result))


def current() -> Admission:
    """Return the admission of the running task; one with defaults where none is set."""
    return _current.get() or Admission(AdmissionRequest(), AdmissionResult())


def refusal_of(error: BatcherError) -> RequestError:
    """Return the error that a client gets for one of the batcher."""
    match error:
        case QueueFull():
            message = f"The queue of this model is full. Try again in {error.retry_after_s:.1f} s."
            return RequestError(429, "rate_limit_error", message, retry_after_s=error.retry_after_s)
        case Expired():
            return RequestError(408, "timeout_error", "The request could not start in the time it allows.")
        case Oversize(what=str()):
            message = (
                f"n: {error.cost} answers must start together, and the engine runs {error.limit} at once"
            )
            return RequestError(400, "invalid_request_error", message, param="n")
        case Oversize():
            return RequestError(400, "invalid_request_error", str(error))
        case _:
            message = "This replica is shutting down. Try again."
            return RequestError(503, "service_unavailable", message, retry_after_s=1.0)
