"""A job: one request on its way through an Engine, from the door to its last token."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from batcher import Slot
from serve_app.api.errors import RequestError
from serve_app.api.facts import Facts
from serve_app.api.scheduling import Scheduling
from serve_app.engine.answer import StreamTokens
from serve_app.ledger.calls import Call
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage

WAITING = 16
"""Prompts of a job that wait to start at once: more would take the queue from other jobs."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through an Engine, and its outcome.

    Attributes:
        request: The request, from the Ingress, from a batch or from a call of the handle.
        began: Arrival in this replica, on the clock of `time.monotonic`.
        scheduling: Tier, tenant and the rest of the queue timeout, as of the arrival here.
        usage: Tokens and times.
        call: The entry of the ledger; None: the ledger has none.
        slot: The slot of the batcher with which the job enters the door; None: it hasn't entered.
        admitted: Whether the door has admitted the job: it may run, with all that it needs.
        more: Reserves more tokens of its quotas; None: the job has none.
        prompt_tokens: Tokens of the prompts that went to the engine.
        values: Answers and logprobs that vLLM makes for its answer, as far as its prompts are known.
        placed: Whether a prompt has taken that slot.
        waiting: Held by further prompts of the job that wait to start, `WAITING` at most.
        stream: Tokens of the answer, if it is a stream that may go on in another Engine.
        searching: Whether a beam search runs, which asks the engine once for each token of each beam.
        constrained: Whether the engine holds the answer to a grammar.
        failure: The error that an exception in vLLM's application makes for the client.
        fault: That exception, if it is the service's fault.
    """

    request: RelayRequest
    began: float = field(default_factory=time.monotonic)
    scheduling: Scheduling = field(init=False)
    usage: RequestUsage = field(default_factory=RequestUsage)
    call: Call | None = None
    slot: Slot | None = None
    admitted: bool = False
    more: Callable[[int], Awaitable[None]] | None = None
    prompt_tokens: int = 0
    values: int = 0
    placed: bool = False
    waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WAITING))
    stream: StreamTokens | None = None
    searching: bool = False
    constrained: bool = False
    failure: RequestError | None = None
    fault: Exception | None = None

    def __post_init__(self) -> None:
        self.scheduling = self.request.scheduling_now()

    @property
    def facts(self) -> Facts:
        """The facts that the body states."""
        return self.request.facts

    async def cover(self, tokens: int) -> None:
        """Reserve the tokens of a prompt beyond the bound of the facts, which the quotas have reserved.

        Args:
            tokens: Tokens of the prompt.

        Raises:
            RequestError: The quotas don't allow it.
        """
        if self.more is None or self.facts.prompt is None:
            return
        covered = max(self.facts.prompt, self.prompt_tokens)
        self.prompt_tokens += tokens
        if self.prompt_tokens > covered:
            await self.more(self.prompt_tokens - covered)

    @property
    def share(self) -> str:
        """Name by which queues share the engine fairly."""
        return self.scheduling.share(self.request.adapter)

    @property
    def deadline(self) -> float | None:
        """Time by which the job must have started, on the clock of `time.monotonic`."""
        return self.scheduling.deadline(self.began)


_current: ContextVar[Job | None] = ContextVar("job", default=None)


def set_current(job: Job) -> None:
    """Set the job of the running task and of the tasks that it starts."""
    _current.set(job)


def current() -> Job | None:
    """Return the job of the running task; None: the engine's own work, such as its warm-up."""
    return _current.get()
