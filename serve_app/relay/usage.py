"""The count of a request: tokens and times of its slots, which ledger, quotas, metrics, log and traces read.

A `RequestUsage` is made when a request comes, and goes with it to its end:

    usage = RequestUsage()
    call = book.open(origin, usage)  # the row of the ledger
    async with batcher.slot(...) as slot:
        own = usage.begin(slot, prompt_tokens=len(prompt))
        ...  # the engine adds its sequences with `own.count`
        own.end("ok")
    call.close()  # the request is over: no slot begins any more

A usage has two counts. Log, quotas, metrics and traces read the tokens of the answer, `prompt_tokens` and
`output_tokens`: a prompt counts once, and the output is what the slot's reader has reported to the batcher.
The ledger reads `counted`, the tokens that the engine itself counts for its sequences: they can be read at
any time and in any thread, also of a request that is aborted, and nothing is added up per token.
"""

import asyncio
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

SCOPE_KEY = "saturate.usage"
"""Key of the ASGI scope under which the Ingress keeps the usage of an answer."""

STATUS_KEY = "saturate.status"
"""Key of the ASGI scope for the status of an answer that began before that was known."""

MAX_SLOTS = 64
"""Slots of one request whose usage is kept one by one; a request may have thousands."""

_FIELDS = struct.Struct(">IIffI")

_MOST = (1 << 32) - 1
"""The largest total that crosses the relay; the cost of a function's records may be larger."""

_lock = threading.Lock()
"""Held while tokens move from a sequence into a sum, and while both are read: the ledger has a thread."""

Outcome = Literal["ok", "cancelled", "failed", "lost", "running"]
"""The end of a slot or a call: `cancelled` its client left, `failed` the engine or the function had an error,
`lost` the Engine died. A `running` call has not ended: its row holds the tokens so far."""

_RANK: dict[Outcome, int] = {"ok": 0, "running": 0, "cancelled": 1, "failed": 2, "lost": 3}


def worst(one: Outcome, other: Outcome) -> Outcome:
    """Return the worse of two outcomes."""
    return other if _RANK[other] > _RANK[one] else one


class Tokens(NamedTuple):
    """Tokens of an engine's work, as the engine's own counters have them.

    Attributes:
        prompt: Tokens of prompts, those found in the prefix cache too; once for each sequence.
        cached: Prompt tokens found in the prefix cache.
        output: Tokens that were sampled, also those that no client has got.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        """Return the sums with other tokens."""
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.output + other.output)


NONE = Tokens()


class Sequences(Protocol):
    """Sequences of an engine: one, or all answers to one prompt. Both methods are called in any thread."""

    def tokens(self) -> Tokens:
        """Return what the engine has counted for them so far."""

    def ended(self) -> bool:
        """Return whether the engine counts nothing for them any more."""


class Started(Protocol):
    """A slot of a batcher that has started; its times are those of `time.monotonic`, in seconds."""

    @property
    def submitted_at(self) -> float:
        """Time at which it was asked for."""

    @property
    def started_at(self) -> float:
        """Time of its start."""

    @property
    def output_tokens(self) -> int:
        """Tokens that its reader has reported so far."""


class Usage(NamedTuple):
    """The usage of one slot.

    Attributes:
        submitted_at: Time at which the slot was asked for, on the clock of `time.monotonic`, in seconds.
        started_at: Time of its start.
        ended_at: Time of its end.
        prompt_tokens: Tokens of its prompt, once for all answers to it.
        output_tokens: Tokens of its answers, those of another Engine too where a stream goes on.
        counted: Tokens that the engine has counted for its sequences.
        outcome: Its end.
        cost: Cost of the records of a function; 0 for a language model.
    """

    submitted_at: float
    started_at: float
    ended_at: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: Tokens = NONE
    outcome: Outcome = "ok"
    cost: int = 0

    @property
    def waited_s(self) -> float:
        """Seconds in the batcher's queue."""
        return self.started_at - self.submitted_at

    @property
    def ran_s(self) -> float:
        """Seconds in the engine."""
        return self.ended_at - self.started_at

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were in the engine's prefix cache."""
        # Further sequences find the prompt there, and a stream that goes on has more there than its prompt.
        return min(self.counted.cached, self.prompt_tokens)


class SlotUsage:
    """The usage of a slot that runs; see `RequestUsage.begin`."""

    __slots__ = ("_counted", "_prompt_tokens", "_request", "_running", "_slot", "over")

    def __init__(self, request: "RequestUsage", slot: Started, prompt_tokens: int) -> None:
        self._request = request
        self._slot = slot
        self._prompt_tokens = prompt_tokens
        self._counted = NONE
        self._running: list[Sequences] = []
        self.over = False

    def count(self, sequences: Sequences) -> None:
        """Add sequences that the engine has begun for the slot.

        Raises:
            asyncio.CancelledError: The slot has ended, so the task that asks has outlived it.
        """
        if self.over:
            raise asyncio.CancelledError("the slot has ended")
        with _lock:
            # A beam search has thousands, one after the other: the sequences that have ended are added up.
            running = [sequences]
            for each in self._running:
                if each.ended():
                    self._counted = self._counted.plus(each.tokens())
                else:
                    running.append(each)
            self._running = running
            self._request.ran = True

    def end(self, outcome: Outcome = "ok") -> None:
        """End the slot; its sequences have ended. Again does nothing.

        Args:
            outcome: Its end.
        """
        if self.over:
            return
        self.over = True
        request, slot = self._request, self._slot
        with _lock:
            times = slot.submitted_at, slot.started_at, request.now()
            usage = Usage(*times, self._prompt_tokens, slot.output_tokens, self._tokens(), outcome)
            self._running = []
            request._running.discard(self)
            request._add(usage)
        request._end_if_idle()

    def _tokens(self) -> Tokens:
        total = self._counted
        for each in self._running:
            total = total.plus(each.tokens())
        return total


@dataclass(slots=True)
class RequestUsage:
    """The usage of a request, over all of its slots.

    Attributes:
        prompt_tokens: Tokens in, of the slots that have ended; each prompt once.
        output_tokens: Tokens out, of the slots that have ended.
        wait_s: Seconds in the batcher's queue; of several slots, the longest wait.
        engine_s: Seconds from the submission of the first slot to the last end of one.
        cached_tokens: Tokens in that were in the engine's prefix cache.
        slots: The first `MAX_SLOTS` slots that have ended. They don't cross the relay, nor does all below.
        counted: Tokens that the engine has counted for the slots that have ended.
        cost: Cost of the records of a function.
        outcome: The worst outcome of a slot.
        ran: The engine got a sequence, or a function a record.
        now: The clock of the slots, in seconds.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    wait_s: float = 0.0
    engine_s: float = 0.0
    cached_tokens: int = 0
    slots: list[Usage] = field(default_factory=list)
    counted: Tokens = NONE
    cost: int = 0
    outcome: Outcome = "ok"
    ran: bool = False
    now: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    _running: set[SlotUsage] = field(default_factory=set, repr=False, compare=False)
    _submitted_at: float = field(default=float("inf"), repr=False, compare=False)
    _started_at: float = field(default=float("inf"), repr=False, compare=False)
    _ended_at: float = field(default=0.0, repr=False, compare=False)
    _closed: bool = field(default=False, repr=False, compare=False)
    _then: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def begin(self, slot: Started | None = None, prompt_tokens: int = 0) -> SlotUsage:
        """Begin the usage of a slot.

        Args:
            slot: The slot; None: the work has none, and starts now.
            prompt_tokens: Tokens of its prompt.

        Raises:
            asyncio.CancelledError: The request has ended, so the task that asks has outlived it.
        """
        if self._closed:
            raise asyncio.CancelledError("the request has ended")
        if slot is None:
            now = self.now()
            slot = Usage(now, now, now)
        own = SlotUsage(self, slot, prompt_tokens)
        with _lock:
            self._running.add(own)
            self._begin(slot)
        return own

    def add(self, usage: Usage) -> None:
        """Add a slot that has ended; it ran."""
        with _lock:
            self.ran = True
            self._begin(usage)
            self._add(usage)

    def close(self, then: Callable[[], None]) -> None:
        """End the request: no slot begins any more. Again does nothing.

        Args:
            then: Called once the slots that run have ended; at once, if none runs.
        """
        if not self._closed:
            self._closed, self._then = True, then
            self._end_if_idle()

    def total(self) -> Tokens:
        """Return the tokens that the engine has counted so far. It is called in any thread."""
        with _lock:
            total = self.counted
            for slot in self._running:
                total = total.plus(slot._tokens())
            return total

    def run_s(self) -> float:
        """Return the seconds from the first start of a slot to the last end, or to now while one runs."""
        ended_at = self.now() if self._running or not self._closed else self._ended_at
        return max(0.0, ended_at - self._started_at)

    def pack(self) -> bytes:
        """Return the totals that cross the relay as bytes."""
        return _FIELDS.pack(
            min(self.prompt_tokens, _MOST),
            min(self.output_tokens, _MOST),
            self.wait_s,
            self.engine_s,
            min(self.cached_tokens, _MOST),
        )

    @classmethod
    def unpack(cls, data: bytes) -> "RequestUsage":
        """Read the totals that `pack` wrote."""
        return cls(*_FIELDS.unpack(data))

    def _begin(self, slot: Started) -> None:
        self.wait_s = max(self.wait_s, slot.started_at - slot.submitted_at)
        self._submitted_at = min(self._submitted_at, slot.submitted_at)
        self._started_at = min(self._started_at, slot.started_at)

    def _add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.output_tokens
        self.cached_tokens += usage.cached_tokens
        self.counted = self.counted.plus(usage.counted)
        self.cost += usage.cost
        self.outcome = worst(self.outcome, usage.outcome)
        self._ended_at = max(self._ended_at, usage.ended_at)
        self.engine_s = self._ended_at - self._submitted_at
        if len(self.slots) < MAX_SLOTS:
            self.slots.append(usage)

    def _end_if_idle(self) -> None:
        if self._closed and not self._running and self._then is not None:
            then, self._then = self._then, None
            then()
