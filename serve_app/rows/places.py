"""The order of rows: runs and their rows, places at the engines, shares of tenants, and waits."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from serve_app.api.scheduling import Scheduling
from serve_app.rows.errors import RunError
from serve_app.rows.pacing import Concurrency
from serve_app.rows.rows import LostEngines, Result, Row, RowAnswer


class Run:
    """A batch or a dataset whose rows are sent.

    Args:
        endpoint: Route that its rows call, such as `/v1/chat/completions`.
        scheduling: Tier, tenant and weight of its rows.
        models: Ids of the models that its rows may name; None: all.

    Attributes:
        base: The model whose engines run its rows; None: the rows have several models, or an unknown model.
        rows: Rows that are read and not yet taken.
        in_flight: Rows that were taken and have no recorded result.
        due: Rows in flight whose next try is due.
        tries: The tries of its rows that are in progress.
        stopping: Whether no row may be sent any more.
    """

    def __init__(self, endpoint: str, scheduling: Scheduling, models: Collection[str] | None = None) -> None:
        self.endpoint = endpoint
        self.scheduling = scheduling
        self.models = models
        self.base: str | None = None
        self.rows: deque[Row] = deque()
        self.in_flight = 0
        self.due: deque[TakenRow] = deque()
        self.tries: set[asyncio.Task[Any]] = set()
        self.stopping = False

    @property
    def tenant(self) -> str:
        """Name of its tenant."""
        return self.scheduling.tenant

    @property
    def weight(self) -> float:
        """The tenant's share relative to other tenants."""
        return self.scheduling.weight or 1.0

    def body(self, row: Row) -> bytes:
        """Return the body to send for a row, as JSON. Runs in a thread for a large row."""
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


@dataclass(slots=True, eq=False)
class TakenRow:
    """A row in flight, with the outcomes of its tries.

    Attributes:
        run: Its run.
        row: The row.
        placed: Whether it has a place at the engines.
        tries: Times that it was sent.
        failures: Failures that count.
        faults: Times that each fault of the service (500) was its answer, by message.
        answered: Rows of its model that were answered until its first try, and until its last failures.
        lost: Engines that were lost with it.
        due_at: When its next try is due, in seconds of the event loop's clock, while it waits.
    """

    run: Run
    row: Row
    placed: bool = False
    tries: int = 0
    failures: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    answered: list[int] = field(default_factory=list)
    lost: LostEngines = field(default_factory=list)
    due_at: float = 0.0

    def __lt__(self, other: "TakenRow") -> bool:
        return self.due_at < other.due_at


class Waits:
    """Rows in flight that wait for their next try: a heap with one timer.

    Args:
        changed: Called when rows have become due.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._heap: list[TakenRow] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, taken: TakenRow, wait_s: float) -> None:
        """Let a row wait; afterwards the row joins `Run.due`."""
        taken.due_at = asyncio.get_running_loop().time() + wait_s
        heappush(self._heap, taken)
        self._set_timer()

    def drop(self, run: Run) -> list[TakenRow]:
        """Remove the rows of a run from the waits, and return these rows."""
        dropped = [taken for taken in self._heap if taken.run is run]
        self._heap = [taken for taken in self._heap if taken.run is not run]
        heapify(self._heap)
        return dropped

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        first = self._heap[0].due_at
        if self._timer is not None:
            if self._timer.when() <= first:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(first, self._end)

    def _end(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0].due_at <= now:
            taken = heappop(self._heap)
            taken.run.due.append(taken)
        if self._heap:
            self._set_timer()
        self._changed()


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


FILL_ROWS = 32
"""Rows that get a place at once: each blocks the event loop for a fraction of a millisecond."""


class Places:
    """Gives rows their places at the engines of one model.

    A row is in flight from the time at which it is taken until its result is recorded. A row in flight has a
    place, except while it waits for its next try. So neither a model that is down nor a quota that is used up
    holds up another tenant.

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

    def fill(self, heads: Sequence[Run]) -> list[TakenRow]:
        """Give free places to rows, to at most `FILL_ROWS` at once, and return these rows.

        Args:
            heads: The next run of each tenant; each has rows, or rows whose next try is due.
        """
        heads = list(heads)
        found: list[TakenRow] = []
        while heads and self.used < self._concurrency.limit:
            if len(found) == FILL_ROWS:
                self._changed()
                break
            one = min(heads, key=lambda head: self._shares.turn(head.tenant, head.weight))
            if one.due:
                taken = one.due.popleft()
                more = bool(one.due)
            elif self._has_room(one.tenant, one.rows[0]):
                taken = self._take(one)
                more = bool(one.rows)
            elif self._in_flight_of[one.tenant] > self._shares.of(one.tenant):
                # Some rows wait for their next try, perhaps for hours, while rows of other tenants fit.
                heads.remove(one)
                continue
            else:
                break
            self._shares.start(one.tenant, one.weight)
            taken.placed = True
            found.append(taken)
            if not more:
                heads.remove(one)
                # More rows may be read, or another run of the tenant may be next.
                self._changed()
        return found

    def wait(self, taken: TakenRow) -> None:
        """Free the place of a row that waits for its next try."""
        taken.placed = False
        self._shares.end(taken.run.tenant)
        self._changed()

    def leave(self, taken: TakenRow) -> None:
        """Count a row that is no longer in flight."""
        run = taken.run
        if taken.placed:
            self._shares.end(run.tenant)
        run.in_flight -= 1
        self.in_flight -= 1
        self._in_flight_of[run.tenant] -= 1
        self._bytes -= len(taken.row.text)

    def _has_room(self, tenant: str, row: Row) -> bool:
        """Return whether a row of a tenant may be taken; the tenant's first row always may."""
        in_flight = self._in_flight_of[tenant]
        fits = self._bytes + len(row.text) <= self._max_bytes
        return not in_flight or (fits and in_flight < self._concurrency.limit)

    def _take(self, run: Run) -> TakenRow:
        taken = TakenRow(run, run.rows.popleft())
        run.in_flight += 1
        self.in_flight += 1
        self._in_flight_of[run.tenant] += 1
        self._bytes += len(taken.row.text)
        return taken
