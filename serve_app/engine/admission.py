"""How one request asks the gate for admission, and what the gate said."""

from contextvars import ContextVar
from dataclasses import dataclass, field

from batcher import BatcherError, Expired, Oversize, QueueFull
from serve_app.api.errors import RequestError
from serve_app.api.scheduling import DEFAULT_SCHEDULING, Scheduling
from serve_app.relay.resume import Trail
from serve_app.relay.usage import RequestUsage


@dataclass(slots=True)
class Admission:
    """What the gate needs to know of a request, and its verdict.

    The request's task carries it in `current`, so that it reaches the gate through code that knows
    nothing of it: vLLM's own application.

    Attributes:
        scheduling: The scheduling that the request states.
        deadline: When it must have started, on the clock of `time.monotonic`.
        wait: Wait for room when the queue is full, instead of being refused.
        refusal: The gate's reason, once it has refused.
        trail: What is needed to carry on its answer elsewhere, if that is a stream.
        token_ids: The tokens that its answer, a stream, has brought elsewhere already.
        usage: What the request has taken.
        admitted: The gate has let it through to the engine.
    """

    scheduling: Scheduling = DEFAULT_SCHEDULING
    deadline: float | None = None
    wait: bool = False
    refusal: RequestError | None = None
    trail: Trail | None = None
    token_ids: list[int] = field(default_factory=list)
    usage: RequestUsage = field(default_factory=RequestUsage)
    admitted: bool = False


current: ContextVar[Admission | None] = ContextVar("admission", default=None)


def explain(error: BatcherError) -> RequestError:
    """Turn what the batcher raised into what a client is told."""
    match error:
        case QueueFull():
            message = f"The queue of this model is full. Try again in {error.retry_after_s:.1f} s."
            return RequestError(429, "rate_limit_error", message, retry_after_s=error.retry_after_s)
        case Expired():
            return RequestError(408, "timeout_error", "The request could not start in the time it allows.")
        case Oversize():
            return RequestError(400, "invalid_request_error", str(error))
        case _:
            message = "This replica is shutting down. Try again."
            return RequestError(503, "service_unavailable", message, retry_after_s=1.0)
