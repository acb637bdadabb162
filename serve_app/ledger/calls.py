"""The calls of an Engine replica and the work that they cause, while they run and in sums since its start."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from serve_app.api.scheduling import tier
from serve_app.ledger.rows import Outcome, Row, Source, Tokens, utc

FOLD = 64
"""Sequences of a part from which on those that have ended are added up: a beam search has thousands."""

MAX_ENDED = 50_000
"""Ended calls that wait for the writer; the rows of more are dropped."""

MAX_TENANTS = 1_000
"""Tenants with sums of their own; those that come later share one."""

OTHER = "other"

NONE = Tokens()

RANK: dict[Outcome, int] = {"ok": 0, "cancelled": 1, "failed": 2, "lost": 3}
"""The worst outcome of its parts is that of a call."""


class Sequence(Protocol):
    """One sequence of an engine."""

    def tokens(self) -> Tokens:
        """Return what the engine has counted for it so far. It is called in any thread."""

    def ended(self) -> bool:
        """Return whether the engine counts nothing for it any more."""


class Origin(NamedTuple):
    """Origin of a call.

    Attributes:
        key: Name of the API key.
        tenant: The tenant.
        priority: Priority of its tier.
        endpoint: The route, or the method of the handle.
        source: Origin.
        headers: Headers, of which one has the request's id.
        resumed: It goes on with a stream that broke elsewhere.
        adapter: Id of the adapter; empty: none.
    """

    key: str = ""
    tenant: str = ""
    priority: int = 0
    endpoint: str = ""
    source: Source = "http"
    headers: list[tuple[bytes, bytes]] = []  # noqa: RUF012
    resumed: bool = False
    adapter: str = ""

    @property
    def request_id(self) -> str:
        """Id of the request; empty: it has none."""
        for name, value in self.headers:
            if name == b"x-request-id":
                return value[:128].decode("latin-1")
        return ""


class Sums(NamedTuple):
    """Sums over calls.

    Attributes:
        calls: Calls that have ended.
        prompt: Tokens of prompts, as in `Tokens`.
        cached: Those found in the prefix cache.
        output: Tokens that were sampled.
        cost: Cost of the records of a function.
    """

    calls: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    cost: int = 0

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums with others."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


class Part:
    """One prompt of a call, from its start in the engine to its end."""

    __slots__ = ("_call", "_ended", "_sequences")

    def __init__(self, call: "Call") -> None:
        self._call = call
        self._ended = False
        self._sequences: list[Sequence] = []

    def begin(self, sequence: Sequence) -> None:
        """Add a sequence that the engine gets."""
        call = self._call
        if self._ended:
            # A task that has outlived its call.
            call.book.stray().begin(sequence)
            return
        call.ran = True
        if len(self._sequences) >= FOLD:
            self._fold()
        self._sequences.append(sequence)

    def end(self, outcome: Outcome = "ok") -> None:
        """End the part; its sequences have ended."""
        call = self._call
        with call.book.lock:
            for sequence in self._sequences:
                tokens = sequence.tokens()
                call.done = tokens if call.done is NONE else call.done.plus(tokens)
            self._sequences = []
            self._ended = True
            call.parts.discard(self)
        call.ended_at = call.book.now()
        if RANK[outcome] > RANK[call.outcome]:
            call.outcome = outcome
        if call.closed and not call.parts:
            call.book.finish(call)

    def tokens(self) -> Tokens:
        """Return the tokens of the sequences that are not added up yet."""
        total = NONE
        for sequence in self._sequences:
            total = total.plus(sequence.tokens())
        return total

    def _fold(self) -> None:
        with self._call.book.lock:
            kept = []
            for sequence in self._sequences:
                if sequence.ended():
                    self._call.done = self._call.done.plus(sequence.tokens())
                else:
                    kept.append(sequence)
            self._sequences = kept


class Call:
    """One call of an Engine.

    It ends when its answer has ended and all of its parts: an application may need a moment to stop what its
    client has left. Work that begins still later belongs to a call of its own, with the same origin.

    Attributes:
        book: All calls of the replica.
        origin: Origin.
        number: Number in the book; 0 until it has a part.
        parts: Its prompts in the engine.
        done: Tokens of the sequences that have ended.
        cost: Cost of the records of a function.
        ran: The engine got a sequence or a record of it.
        closed: Its answer has ended.
        outcome: The worst one so far.
        wait_s: The longest wait of a part.
        began_at: First start of a part, on the book's clock.
        ended_at: Last end of a part.
        time: When it ended, in seconds since the epoch; 0: it has not.
    """

    __slots__ = (
        "began_at",
        "book",
        "closed",
        "cost",
        "done",
        "ended_at",
        "number",
        "origin",
        "outcome",
        "parts",
        "ran",
        "time",
        "wait_s",
    )

    def __init__(self, book: "CallBook", origin: Origin) -> None:
        self.book = book
        self.origin = origin
        self.number = 0
        self.parts: set[Part] = set()
        self.done = NONE
        self.cost = 0
        self.ran = False
        self.closed = False
        self.outcome: Outcome = "ok"
        self.wait_s = 0.0
        self.began_at = 0.0
        self.ended_at = 0.0
        self.time = 0.0

    def part(self, wait_s: float = 0.0) -> Part:
        """Begin a part.

        Args:
            wait_s: Seconds that it has waited in the queue.
        """
        if self.time:
            late = Call(self.book, self.origin)
            late.closed = True
            return late.part(wait_s)
        if not self.number:
            self.began_at = self.book.now()
            self.book.add(self)
        if wait_s > self.wait_s:
            self.wait_s = wait_s
        part = Part(self)
        self.parts.add(part)
        return part

    def ran_records(self, cost: int, engine_s: float) -> None:
        """Note the records of a function that ran.

        Args:
            cost: Their cost.
            engine_s: Seconds from their submission to their end: with the wait, which a batch has as a whole.
        """
        if not self.number:
            self.began_at = self.book.now() - engine_s
            self.book.add(self)
        self.ran = True
        self.cost += cost
        self.ended_at = self.began_at + engine_s

    def close(self, outcome: Outcome = "ok") -> None:
        """Note that the answer has ended."""
        if RANK[outcome] > RANK[self.outcome]:
            self.outcome = outcome
        self.closed = True
        if self.number and not self.parts and not self.time:
            self.book.finish(self)

    def tokens(self) -> Tokens:
        """Return the tokens so far. It is called in any thread."""
        if self.time:
            return self.done
        with self.book.lock:
            total = self.done
            # A copy: another thread may add a part meanwhile.
            for part in tuple(self.parts):
                total = total.plus(part.tokens())
            return total

    def row(self, now: float, outcome: Outcome = "running") -> Row:
        """Return the call as a row.

        Args:
            now: Seconds since the epoch, for a call that has not ended.
            outcome: Its outcome, if it has not ended.
        """
        book, origin = self.book, self.origin
        tokens = self.tokens()
        ended = bool(self.time)
        engine_s = (self.ended_at if ended else book.now()) - self.began_at
        return Row(
            call=f"{book.name}-{self.number}",
            time=utc(self.time if ended else now),
            key=origin.key,
            tenant=origin.tenant,
            model=book.model,
            adapter=origin.adapter,
            tier=tier(origin.priority),
            endpoint=origin.endpoint,
            source=origin.source,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            output_tokens=tokens.output,
            cost=self.cost,
            wait_s=round(self.wait_s, 6),
            engine_s=round(max(0.0, engine_s), 6),
            outcome=self.outcome if ended else outcome,
            resumed=origin.resumed,
            request_id=origin.request_id,
            replica=book.replica,
        )


class CallBook:
    """All calls of an Engine replica.

    Calls are made and ended on the event loop; any other thread may read them.

    Args:
        model: Id of the model.
        replica: The replica.
        name: Unique name of this process in the ledger.
        now: Monotonic clock, in seconds.
        clock: Seconds since the epoch.

    Attributes:
        lock: Held while sequences are added up, and while they are read.
        dropped: Rows that were dropped: the writer didn't keep up.
    """

    def __init__(
        self,
        model: str,
        replica: str = "",
        name: str = "",
        *,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = model
        self.replica = replica
        self.name = name
        self.now = now
        self.lock = threading.Lock()
        self.dropped = 0
        self._clock = clock
        self._numbers = 0
        self._running: dict[int, Call] = {}
        self._ended: deque[Call] | None = None
        self._sums: dict[str, list[int]] = {}
        self._stray: Part | None = None

    def open(self, origin: Origin) -> Call:
        """Return a new call. It has a row once the engine runs a part of it."""
        return Call(self, origin)

    def stray(self) -> Part:
        """Return the part of sequences that belong to no call."""
        if self._stray is None:
            self._stray = self.open(Origin(source="engine")).part()
        return self._stray

    def add(self, call: Call) -> None:
        """Note a call that has its first part."""
        self._numbers += 1
        call.number = self._numbers
        self._running[call.number] = call

    def finish(self, call: Call) -> None:
        """Note a call that has ended; one that gave the engine nothing leaves no row."""
        call.time = self._clock()
        if call.ran:
            if self._ended is not None:
                if len(self._ended) < MAX_ENDED:
                    self._ended.append(call)
                else:
                    self.dropped += 1
            name = call.origin.tenant
            if name not in self._sums and len(self._sums) >= MAX_TENANTS:
                name = OTHER
            sums = self._sums.get(name)
            if sums is None:
                sums = self._sums[name] = [0] * len(Sums._fields)
            prompt, cached, output = call.done
            sums[0] += 1
            sums[1] += prompt
            sums[2] += cached
            sums[3] += output
            sums[4] += call.cost
        # The last step: the writer reads the running calls before the ended ones, and misses none.
        del self._running[call.number]

    def keep_ended(self) -> None:
        """Keep calls that end, for `take`."""
        if self._ended is None:
            self._ended = deque()

    def take(self) -> tuple[list[Call], list[Call]]:
        """Return the calls that run, and those that have ended since the last call.

        A call that ends meanwhile is among the running ones, and among the ended ones of the next call.
        """
        running = [call for call in list(self._running.values()) if call.ran]
        ended: list[Call] = []
        while self._ended:
            ended.append(self._ended.popleft())
        numbers = {call.number for call in ended}
        return [call for call in running if call.number not in numbers], ended

    def by_tenant(self) -> dict[str, Sums]:
        """Return the sums of the calls since the start, by tenant; those of running calls too."""
        sums = {name: Sums(*each) for name, each in self._sums.items()}
        for call in list(self._running.values()):
            name = call.origin.tenant
            if name not in sums and len(sums) >= MAX_TENANTS:
                name = OTHER
            sums[name] = sums.get(name, Sums()).plus(Sums(0, *call.tokens(), call.cost))
        return sums

    def total(self) -> Sums:
        """Return the sums of all calls since the start."""
        total = Sums()
        for sums in self.by_tenant().values():
            total = total.plus(sums)
        return total
