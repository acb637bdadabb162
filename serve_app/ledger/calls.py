"""The calls of an Engine replica: the running calls, and sums since its start.

The end of a call is one event with one count of tokens, which settles the reservations and fills the row.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol, Self

from serve_app.api.headers import request_id
from serve_app.api.scheduling import tier
from serve_app.ledger.rows import LedgerRow, utc
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import Outcome, RequestUsage, worst

MAX_ENDED = 50_000
"""Maximum ended calls that wait for the writer; the rows of further calls are dropped."""

MAX_TENANTS = 1_000
"""Maximum tenants with their own sums; later tenants have one sum together."""

OTHER = "other"


class Sums(NamedTuple):
    """Sums over calls.

    Attributes:
        calls: Calls that have ended.
        prompt: Tokens of prompts, as in `Tokens`.
        cached: Prompt tokens found in the prefix cache.
        output: Tokens that were sampled.
        cost: Cost of the records of a function.
    """

    calls: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    cost: int = 0

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums of both."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


class Settleable(Protocol):
    """A reservation of a call in its quotas."""

    tokens: int

    def settle(self, tokens: int, *, request: bool) -> None:
        """Charge the use of the call, and give back the rest.

        Args:
            tokens: Tokens of prompts and answers.
            request: Whether the call counts as a request: a refused call doesn't.
        """


class Call:
    """One call of an Engine: its request, and the usage of its slots.

    Attributes:
        request: The request.
        usage: Its usage, which the row reads.
        reservations: Its reservations; none if the call has no quota.
        admitted: Whether it counts as a request even if it runs nothing.
        over_quota: Whether its quotas have nothing left for it now.
        number: Number in the book.
        outcome: The worst outcome of its slots and its answer.
        time: Time of its end, in seconds since the epoch; 0: it hasn't ended.
    """

    __slots__ = (
        "_book",
        "admitted",
        "number",
        "outcome",
        "over_quota",
        "request",
        "reservations",
        "time",
        "usage",
    )

    def __init__(self, book: "CallBook", request: RelayRequest, usage: RequestUsage, number: int) -> None:
        self._book = book
        self.request = request
        self.usage = usage
        self.reservations: list[Settleable] = []
        self.admitted = self.over_quota = False
        self.number = number
        self.outcome: Outcome = "ok"
        self.time = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, outcome: Outcome = "ok") -> None:
        """Close the call; it ends with its last slot. A second call does nothing.

        Args:
            outcome: The outcome of its answer; the worst outcome of the slots and the answer counts.
        """
        self.outcome = worst(self.outcome, outcome)
        self.usage.close(lambda: self._book.finish(self))

    def row(self) -> LedgerRow:
        """Return the ended call as a row. Any thread may call this method."""
        book, request, usage = self._book, self.request, self.usage
        scheduling, tokens = request.scheduling, usage.counted
        return LedgerRow(
            call=f"{book.name}-{self.number}",
            time=utc(self.time),
            key=request.key,
            tenant=scheduling.tenant,
            model=book.model,
            adapter=request.adapter,
            tier=tier(scheduling.priority),
            # A handle call has the name of its method.
            endpoint=request.path.lstrip("/") if request.source == "handle" else request.path,
            source=request.source,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            output_tokens=tokens.output,
            cost=usage.cost,
            wait_s=round(usage.wait_s, 6),
            engine_s=round(usage.run_s(), 6),
            outcome=self.outcome,
            resumed=request.resumes,
            request_id=request_id(request.headers),
            replica=book.replica,
        )


class CallBook:
    """All calls of an Engine replica.

    Calls are opened and closed on the event loop; any other thread may read them.

    Args:
        model: Id of the model.
        replica: The replica.
        name: Unique name of this process in the ledger.
        clock: Seconds since the epoch.

    Attributes:
        dropped: Rows that were dropped because the writer didn't keep up.
    """

    def __init__(
        self, model: str, replica: str = "", name: str = "", *, clock: Callable[[], float] = time.time
    ) -> None:
        self.model = model
        self.replica = replica
        self.name = name
        self.dropped = 0
        self._clock = clock
        self._numbers = 0
        self._running: dict[int, Call] = {}
        self._ended: deque[Call] | None = None
        self._sums: dict[str, Sums] = {}

    def open(self, request: RelayRequest, usage: RequestUsage) -> Call:
        """Return a new call, which must be closed. The call gets a row only if the engine runs a part of it.

        Args:
            request: Its request.
            usage: Its usage.
        """
        self._numbers += 1
        call = Call(self, request, usage, self._numbers)
        self._running[self._numbers] = call
        return call

    def finish(self, call: Call) -> None:
        """Settle a call that has ended, and keep it for its row; a call that never ran has no row."""
        usage, reservations = call.usage, call.reservations
        call.outcome = worst(call.outcome, usage.outcome)
        call.time = self._clock()
        tokens = usage.counted.prompt + usage.counted.output
        for reservation in reversed(reservations):
            # The first reservation counts the request, and is charged the tokens beyond the other ones.
            used = tokens if reservation is reservations[0] else min(tokens, reservation.tokens)
            reservation.settle(used, request=usage.ran or call.admitted)
            tokens -= used
        if usage.ran:
            name = call.request.scheduling.tenant
            if name not in self._sums and len(self._sums) >= MAX_TENANTS:
                name = OTHER
            sums = self._sums.get(name, Sums())
            self._sums[name] = sums.plus(Sums(1, *usage.counted, usage.cost))
            if self._ended is not None and len(self._ended) < MAX_ENDED:
                # The row needs no body, and many calls may wait for the writer.
                call.request = replace(call.request, body=b"", token_ids=b"")
                self._ended.append(call)
            else:
                self.dropped += self._ended is not None
        del self._running[call.number]

    def keep_ended(self) -> None:
        """Keep calls that end, for `take`."""
        if self._ended is None:
            self._ended = deque()

    def take(self) -> list[Call]:
        """Return the calls that have ended since the last call of `take`."""
        ended: list[Call] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def by_tenant(self) -> dict[str, Sums]:
        """Return the sums of the calls since the start, by tenant, including running calls."""
        sums = dict(self._sums)
        for call in list(self._running.values()):
            if not call.usage.ran:
                continue
            name = call.request.scheduling.tenant
            if name not in sums and len(sums) >= MAX_TENANTS:
                name = OTHER
            sums[name] = sums.get(name, Sums()).plus(Sums(0, *call.usage.total(), call.usage.cost))
        return sums
