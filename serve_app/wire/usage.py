"""The count of a request: tokens and times of its slots, which ledger, quotas, metrics, log and traces read.

A `RequestUsage` is made when a request comes, and goes with it to its end:

    usage = RequestUsage()
    call = book.open(request, usage)  # the row of the ledger
    async with batcher.slot(...) as slot:
        own = usage.begin(slot)
        ...  # the engine adds its sequences with `own.count`, see `engine.vllm.stats.slot_usage`
        own.end("ok")
    call.close()  # the request is over: no slot begins any more

Tokens are counted once, by the engine itself. The count can be read at any time and in any thread, also of a
request that is aborted, and nothing is added up per token.
"""

import asyncio
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from batcher import Slot

_FIELDS = struct.Struct(">QQQffB")

_lock = threading.Lock()
"""Held while tokens move from a sequence into a sum, and while both are read: the ledger has a thread."""

Outcome = Literal["ok", "cancelled", "failed", "lost"]
"""The end of a slot or a call: `cancelled` its client left, `failed` the engine or the function had an error,
`lost` the Engine died."""

_OUTCOMES: tuple[Outcome, ...] = ("ok", "cancelled", "failed", "lost")
"""From the best to the worst."""

_RANK = {outcome: rank for rank, outcome in enumerate(_OUTCOMES)}


def worst(one: Outcome, other: Outcome) -> Outcome:
    """Return the worse of two outcomes."""
    return other if _RANK[other] > _RANK[one] else one


class Tokens(NamedTuple):
    """Tokens of an engine's work, as the engine's own counters have them.

    Attributes:
        prompt: Tokens of prompts, with tokens found in the prefix cache; once for all answers to a prompt.
        cached: Prompt tokens found in the prefix cache.
        output: Tokens that were sampled, also tokens that no client has got.
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
        """Return the tokens that the engine has counted for them so far."""

    def ended(self) -> bool:
        """Return whether the engine counts nothing for them any more."""


@dataclass(slots=True, eq=False)
class Usage:
    """The usage of one slot; see `RequestUsage.begin`.

    Attributes:
        submitted_at: Time at which the slot was asked for, on the clock of `time.monotonic`, in seconds.
        started_at: Time of its start.
        ended_at: Time of its end; 0: it runs.
        counted: Tokens that the engine has counted for the sequences that have ended.
        outcome: How it ended.
        cost: Cost of the records of a function; 0 for a language model.
        searches: Its sequences are steps of a beam search: their prompt counts once, as the prompt of the
            first sequence.
    """

    submitted_at: float
    started_at: float
    ended_at: float = 0.0
    counted: Tokens = NONE
    outcome: Outcome = "ok"
    cost: int = 0
    searches: bool = False
    _request: "RequestUsage | None" = None
    _running: tuple[Sequences, ...] = ()

    def count(self, sequences: Sequences) -> None:
        """Add sequences that the engine has begun for the slot.

        Raises:
            asyncio.CancelledError: The slot has ended, so the task that asks has outlived it.
        """
        if self._request is None:
            raise asyncio.CancelledError("the slot has ended")
        with _lock:
            self._request.ran = True
            running = [sequences]
            # A beam search has thousands, one after the other: the ended ones are added up.
            for each in self._running:
                if each.ended():
                    self.counted = self._plus(self.counted, each)
                else:
                    running.append(each)
            self._running = tuple(running)

    def end(self, outcome: Outcome = "ok") -> None:
        """End the slot; its sequences have ended. Again does nothing."""
        request, self._request = self._request, None
        if request is None:
            return
        with _lock:
            self.ended_at = request.now()
            self.counted, self._running = self._total(), ()
            self.outcome = outcome
            request._running.discard(self)
            request._add(self)
        request._end_if_idle()

    def produced(self) -> int:
        """Return the tokens of its answers that the engine has counted so far."""
        with _lock:
            return self._total().output

    def _total(self) -> Tokens:
        total = self.counted
        for each in self._running:
            total = self._plus(total, each)
        return total

    def _plus(self, total: Tokens, sequences: Sequences) -> Tokens:
        tokens = sequences.tokens()
        if self.searches and total.prompt:
            tokens = Tokens(output=tokens.output)
        return total.plus(tokens)


@dataclass(slots=True)
class RequestUsage:
    """The usage of a request, over all of its slots. The totals are sums over the slots that have ended.

    Attributes:
        counted: Tokens that the engine has counted.
        wait_s: Seconds in the batcher's queue; of several slots, the longest wait.
        engine_s: Seconds from the submission of the first slot to the end of the last slot.
        outcome: The worst outcome.
        cost: Cost of the records of a function. It doesn't cross the relay, nor does all below.
        ran: The engine got a sequence, or a function a record.
        now: The clock of the slots, in seconds.
    """

    counted: Tokens = NONE
    wait_s: float = 0.0
    engine_s: float = 0.0
    outcome: Outcome = "ok"
    cost: int = 0
    ran: bool = False
    now: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    _running: set[Usage] = field(default_factory=set, repr=False, compare=False)
    _submitted_at: float = field(default=float("inf"), repr=False, compare=False)
    _started_at: float = field(default=float("inf"), repr=False, compare=False)
    _ended_at: float = field(default=0.0, repr=False, compare=False)
    _closed: bool = field(default=False, repr=False, compare=False)
    _then: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def begin(self, slot: Slot | Usage | None = None) -> Usage:
        """Begin the usage of a slot, which has to be ended.

        Args:
            slot: The slot, which has started; None: the work has none, and starts now.

        Raises:
            asyncio.CancelledError: The request has ended, so the task that asks has outlived it.
        """
        if self._closed:
            raise asyncio.CancelledError("the request has ended")
        now = self.now()
        times = (now, now) if slot is None else (slot.submitted_at, slot.started_at)
        usage = Usage(*times, _request=self)
        with _lock:
            self._running.add(usage)
            self._begin(usage)
        return usage

    def add(self, usage: Usage) -> None:
        """Add the usage of work that has run and ended, past `begin`."""
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
            for usage in self._running:
                total = total.plus(usage._total())
            return total

    def run_s(self) -> float:
        """Return the seconds from the first start of a slot to the last end, or to now before the end."""
        ended_at = self._ended_at if self._closed and not self._running else self.now()
        return max(0.0, ended_at - self._started_at)

    def pack(self) -> bytes:
        """Return the totals that cross the relay as bytes."""
        return _FIELDS.pack(*self.counted, self.wait_s, self.engine_s, _RANK[self.outcome])

    @classmethod
    def unpack(cls, data: bytes) -> "RequestUsage":
        """Read the totals that `pack` wrote."""
        prompt, cached, output, wait_s, engine_s, rank = _FIELDS.unpack(data)
        return cls(Tokens(prompt, cached, output), wait_s, engine_s, _OUTCOMES[rank])

    def _begin(self, usage: Usage) -> None:
        self.wait_s = max(self.wait_s, usage.started_at - usage.submitted_at)
        self._submitted_at = min(self._submitted_at, usage.submitted_at)
        self._started_at = min(self._started_at, usage.started_at)

    def _add(self, usage: Usage) -> None:
        self.counted = self.counted.plus(usage.counted)
        self.cost += usage.cost
        self.outcome = worst(self.outcome, usage.outcome)
        self._ended_at = max(self._ended_at, usage.ended_at)
        self.engine_s = self._ended_at - self._submitted_at

    def _end_if_idle(self) -> None:
        if self._closed and not self._running and self._then is not None:
            then, self._then = self._then, None
            then()
