"""The order of rows: the rows in memory, their places at the engines, and the shares of tenants."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.jobs.errors import RunError
from serve_app.jobs.pacing import Concurrency
from serve_app.jobs.rows import Result, Row, RowAnswer


class BatchRun:
    """A batch or a dataset whose rows are sent.

    Args:
        endpoint: Route that its rows call, such as `/v1/chat/completions`.
        scheduling: Tier, tenant and weight of its rows.
        models: Ids of the models that its rows may name; None: all.

    Attributes:
        base: The model whose engines run its rows; None: the rows have several models, or it isn't known.
        rows: Rows that are read and not yet sent.
        in_flight: Rows that were taken and have no recorded result.
        due: Events of rows in flight whose next try is due; each is set once the row has a place.
        stopping: Set when no row may be sent any more.
        tries: The tries of its rows that are in progress.
    """

    def __init__(self, endpoint: str, scheduling: Scheduling, models: Collection[str] | None = None) -> None:
        self.endpoint = endpoint
        self.scheduling = scheduling
        self.models = models
        self.base: str | None = None
        self.rows: deque[Row] = deque()
        self.in_flight = 0
        self.due: deque[asyncio.Event] = deque()
        self.stopping = asyncio.Event()
        self.tries: set[asyncio.Future[RowAnswer]] = set()

    @property
    def tenant(self) -> str:
        """Name of its tenant."""
        return self.scheduling.tenant

    @property
    def weight(self) -> float:
        """The tenant's share relative to other tenants."""
        return self.scheduling.weight or 1.0

    def body(self, row: Row) -> JSON:
        """Return the body to send for a row. Runs in a thread for a large row."""
        raise NotImplementedError

    def result(self, row: Row, answer: RowAnswer, tries: int) -> Result:
        """Return the result of a row. Runs in a thread for a large row.

        Args:
            row: The row.
            answer: Its final answer.
            tries: Number of times that it was sent.

        Raises:
            RunError: The run can't continue.
        """
        raise NotImplementedError

    def recorded(self, results: Sequence[Result]) -> None:
        """Handle results that were recorded."""

    def fail(self, error: RunError) -> None:
        """Handle an error with which the run can't continue."""
        raise NotImplementedError

    def abort(self) -> None:
        """End the tries in progress, at the engines too; their rows get no result."""
        for one in self.tries:
            one.cancel()


class Shares:
    """Turns of the tenants, by weight.

    The tenant with the fewest rows at the engines relative to its weight is next. A tie goes to the tenant
    with the fewest rows so far relative to its weight (start-time fair queueing), so that tenants take turns
    at a limit of one row too. A tenant that joins has no credit.

    Attributes:
        total: Rows at the engines.
    """

    def __init__(self) -> None:
        self.total = 0
        self._rows: Counter[str] = Counter()
        self._now = 0.0
        self._next: dict[str, float] = {}

    def of(self, tenant: str) -> int:
        """Return the rows of a tenant at the engines."""
        return self._rows[tenant]

    def turn(self, tenant: str, weight: float) -> tuple[float, float]:
        """Return the rank of a tenant: the lowest rank is next.

        Args:
            tenant: The tenant.
            weight: Its share relative to other tenants.
        """
        return self._rows[tenant] / weight, max(self._now, self._next.get(tenant, 0.0))

    def start(self, tenant: str, weight: float) -> None:
        """Count a row that goes to the engines."""
        self._now = self.turn(tenant, weight)[1]
        self._next[tenant] = self._now + 1 / weight
        self._rows[tenant] += 1
        self.total += 1

    def end(self, tenant: str) -> None:
        """Count a row that has left the engines."""
        self._rows[tenant] -= 1
        self.total -= 1

    def keep(self, tenants: Collection[str]) -> None:
        """Forget other tenants that have no row at the engines."""
        for tenant in self._next.keys() - tenants:
            if not self._rows[tenant]:
                del self._next[tenant], self._rows[tenant]


RunT = TypeVar("RunT", bound="BatchRun")

FILL_ROWS = 32
"""Rows that are taken at once: each blocks the event loop for a fraction of a millisecond."""


class Places:
    """Gives rows their places at the engines of one model.

    A row is in flight from the time at which it is taken until its result is recorded. It has a place during
    this time, except while it waits for its next try or its result for a file that can be written. So a model
    that is down, a quota that is used up or a file that can't be written holds up no other tenant.

    The tenant with the fewest rows at the engines relative to its weight is next.

    Args:
        concurrency: Limit on rows that have a place, and on the rows of each tenant in flight.
        max_bytes: Most bytes of input lines in flight, except for one line of each tenant.
        changed: Called when other rows may get a place.

    Attributes:
        in_flight: Rows in flight.
    """

    def __init__(self, concurrency: Concurrency, max_bytes: int, changed: Callable[[], None]) -> None:
        self._concurrency = concurrency
        self._max_bytes = max_bytes
        self._changed = changed
        self._shares = Shares()
        self._bytes = 0
        self._in_flight_of: Counter[str] = Counter()
        self.in_flight = 0

    @property
    def used(self) -> int:
        """Rows that have a place."""
        return self._shares.total

    def keep(self, tenants: Collection[str]) -> None:
        """Forget other tenants that have no row in flight."""
        self._shares.keep(tenants)
        counts = self._in_flight_of
        for tenant in [name for name, count in counts.items() if not count and name not in tenants]:
            del counts[tenant]

    def fill(self, heads: list[RunT]) -> Iterator[tuple[RunT, Row]]:
        """Give free places to rows, to at most `FILL_ROWS` at once, and yield the rows that were newly taken.

        Args:
            heads: The next run of each tenant; each has rows, or rows whose next try is due.
        """
        given = 0
        while heads and self.used < self._concurrency.limit:
            if (given := given + 1) > FILL_ROWS:
                self._changed()
                return
            one = min(heads, key=lambda head: self._shares.turn(head.tenant, head.weight))
            tenant = one.tenant
            if one.due:
                self._give_place(one)
                more = bool(one.due)
            elif self._has_room(tenant, one.rows[0]):
                row = one.rows.popleft()
                self._take(one, row)
                more = bool(one.rows)
                yield one, row
            elif self._in_flight_of[tenant] > self._shares.of(tenant):
                # Some rows wait for their next try, perhaps for hours, while rows of other tenants fit.
                heads.remove(one)
                continue
            else:
                return
            if not more:
                heads.remove(one)
                # More rows may be read, or another run of the tenant may be next.
                self._changed()

    @asynccontextmanager
    async def away(self, one: BatchRun) -> AsyncGenerator[None, None]:
        """Return the context in which a row waits for its next try; after it, the row has a place."""
        self._shares.end(one.tenant)
        self._changed()
        yield
        placed = asyncio.Event()
        one.due.append(placed)
        if one.stopping.is_set():
            self.stop(one)
        self._changed()
        await placed.wait()

    def stop(self, one: BatchRun) -> None:
        """Stop sending rows of a run. Rows that are due get places only to end."""
        one.stopping.set()
        while one.due:
            self._give_place(one)

    def leave(self, one: BatchRun, row: Row) -> None:
        """Count a row that is no longer in flight."""
        tenant = one.tenant
        self._shares.end(tenant)
        one.in_flight -= 1
        self.in_flight -= 1
        self._in_flight_of[tenant] -= 1
        self._bytes -= len(row.text)

    def _has_room(self, tenant: str, row: Row) -> bool:
        """Return whether a row of a tenant may be taken; the tenant's first row always may."""
        in_flight = self._in_flight_of[tenant]
        fits = self._bytes + len(row.text) <= self._max_bytes
        return not in_flight or (fits and in_flight < self._concurrency.limit)

    def _take(self, one: BatchRun, row: Row) -> None:
        tenant = one.tenant
        self._shares.start(tenant, one.weight)
        one.in_flight += 1
        self.in_flight += 1
        self._in_flight_of[tenant] += 1
        self._bytes += len(row.text)

    def _give_place(self, one: BatchRun) -> None:
        self._shares.start(one.tenant, one.weight)
        one.due.popleft().set()
