"""The queue: every ordering rule, and nothing else. Pure and synchronous; the clock is passed in."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from batcher import checks
from batcher.errors import QueueFull
from batcher.fair_share import Lane, PriorityClass, Queued

BACKGROUND_SHARE = 0.9
"""Share of the bounds that the background may fill."""

LIGHT_SHARE = 0.01
"""Share of what waits that a light tenant has at most: a full queue still takes its records."""

OVERFLOW = 1.25
"""The bounds for light tenants and those who come back, as a multiple of what they are for others."""


class Entry(Queued):
    """A record in the queue.

    Args:
        record: Anything; the queue never looks at it.
        cost: What it costs, in whole units (tokens).
        priority: Lower goes first.
        tenant: Whose it is.
        deadline: Time on the queue's clock by which it must have been taken.
    """

    __slots__ = ("_lane", "cost", "deadline", "priority", "record", "tenant")

    def __init__(
        self,
        record: Any,
        cost: int,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
    ) -> None:
        self.record = record
        self.cost = cost
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self._lane = None


EntryT = TypeVar("EntryT", bound=Queued)


class RequestQueue(Generic[EntryT]):
    """A bounded queue that is fair between tenants and knows priorities, deadlines and cancellation.

    The lowest `priority` class goes first. Inside a class the tenant goes first that was served the
    least cost by its weight (virtual token counter, arXiv 2401.00588): a tenant that joins starts at the
    counter of the least served active one, so neither idling nor a fresh name earns credit. Inside a
    tenant, arrival order.

    A class that has waited for its turn `priority_aging_s` longer than the class one level above goes
    first for one record; each further level takes as long again. So no class starves, and a low class
    with a long backlog can't hold up a high one either.

    A full queue still takes records of a tenant of whom next to nothing waits (1% of all), and those that
    come back after they were refused, up to a quarter beyond the bounds: a tenant that floods the queue is
    refused, not its neighbours, and who waits outside as told isn't passed by who comes just then.

    Every operation but a look at many takes amortised O(log n) of the tenants and deadlines that wait.

    Attributes:
        size: Records that wait.
        cost: Their cost together.

    Args:
        clock: Returns the time in seconds.
        max_size: Most records that may wait; None: no bound.
        max_cost: Most cost that may wait; an empty queue takes any one record. None: no bound.
        priority_aging_s: Seconds, see above; None: a low class waits until all above it is done.
        tenant_weights: Share of a tenant in relation to the others; 1.0 where not given.
        background: The priority from which on a record finds the queue full at nine tenths of its
            bounds, so that there is room for the others; None: all are alike.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_size: int | None = None,
        max_cost: int | None = None,
        priority_aging_s: float | None = 10.0,
        tenant_weights: Mapping[str, float] | None = None,
        background: int | None = None,
    ) -> None:
        checks.function("clock", clock)
        if max_size is not None:
            checks.whole("max_size", max_size, 1)
        if max_cost is not None:
            checks.whole("max_cost", max_cost, 1)
        if priority_aging_s is not None:
            checks.positive("priority_aging_s", priority_aging_s)
        checks.weights("tenant_weights", tenant_weights)
        self._clock = clock
        self._max_size = max_size
        self._max_cost = max_cost
        self._aging = priority_aging_s
        self._weights = dict(tenant_weights or {})
        self.background: float = math.inf if background is None else background
        self.size = 0
        self.cost = 0
        self._classes: dict[int, PriorityClass] = {}
        self._turns: list[tuple[float, int, PriorityClass]] = []
        self._sequence = itertools.count()
        self._deadlines: list[tuple[float, int, EntryT]] = []
        self._timed = 0
        self._expired: list[EntryT] = []

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[EntryT]:
        """Yield every waiting entry, in no particular order."""
        for group in self._classes.values():
            for lane in group.lanes.values():
                yield from lane.walk()

    def classes(self) -> dict[int, tuple[int, int]]:
        """Return how many records wait, and their cost, by priority, of the classes where any does."""
        return {group.priority: (group.live, group.cost) for group in self._classes.values() if group.live}

    def ahead(self, priority: int, tenant: str | None = None) -> tuple[int, int]:
        """Return how many records go before one that comes now, and their cost together.

        Args:
            priority: Its class: all that waits in those before it goes first.
            tenant: Whose it is: inside the class the tenants have turns, so each of the others is served
                once more at most than it has records waiting. None: the whole class goes first.
        """
        records = cost = 0
        for group in self._classes.values():
            if group.priority > priority:
                continue
            live = group.live
            if tenant is not None and group.priority == priority and live:
                lane = group.lanes.get(tenant)
                own = len(lane.entries) - lane.dead if lane is not None else 0
                others = sum(1 for other in group.lanes.values() if other.entries and other is not lane)
                live = min(live, own + others * (own + 1))
            records += live
            cost += group.cost * live // group.live if group.live else 0
        return records, cost

    def full(self, entry: EntryT) -> tuple[str, int] | None:
        """Return the name and value of the bound that keeps an entry out; None: there is room."""
        share = 1.0 if entry.priority < self.background else BACKGROUND_SHARE
        bound = self._bound(entry.cost, share)
        if bound is None or not (entry.returning or self._light(entry.tenant)):
            return bound
        return self._bound(entry.cost, share * OVERFLOW)

    def _bound(self, cost: int, share: float) -> tuple[str, int] | None:
        if self._max_size is not None and self.size + 1 > share * self._max_size and self.size:
            return "max_queue_size", self._max_size
        if self._max_cost is not None and self.size and self.cost + cost > share * self._max_cost:
            return "max_queue_cost", self._max_cost
        return None

    def _light(self, tenant: str) -> bool:
        lanes = [group.lanes.get(tenant) for group in self._classes.values()]
        waiting = sum(len(lane.entries) - lane.dead for lane in lanes if lane is not None)
        return waiting <= LIGHT_SHARE * self.size

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Change the tenants' shares from now on; what they were served is not counted anew.

        Args:
            weights: Share of a tenant in relation to the others; 1.0 where not given.

        Raises:
            ValueError: A weight is not a finite number above 0.
        """
        checks.weights("tenant_weights", weights)
        self._weights = dict(weights)
        for group in self._classes.values():
            for lane in group.lanes.values():
                lane.weight = self._weights.get(lane.tenant, 1.0)

    def add(self, entry: EntryT) -> None:
        """Put an entry in its place.

        Raises:
            QueueFull: There is no room for it.
        """
        bound = self.full(entry)
        if bound is not None:
            raise QueueFull(*bound, retry_after_s=0.0)
        self.put(entry)

    def weigh(self, tenant: str, weight: float) -> None:
        """Give a tenant a weight of its own, for what it is served from now on.

        Raises:
            ValueError: The weight is no finite number above 0.
        """
        if self._weights.get(tenant) == weight:
            return
        checks.positive("weight", weight)
        self._weights[tenant] = weight
        for group in self._classes.values():
            if lane := group.lanes.get(tenant):
                lane.weight = weight

    def put(self, entry: EntryT) -> None:
        """Put an entry in its place, whether there is room or not: the caller has asked `full`."""
        group = self._classes.get(entry.priority)
        if group is None:
            group = self._classes[entry.priority] = PriorityClass(entry.priority)
        lane = group.lanes.get(entry.tenant)
        if lane is None:
            weight = self._weights.get(entry.tenant, 1.0)
            lane = group.lanes[entry.tenant] = Lane(group, entry.tenant, weight)
        if not lane.entries:
            self._activate(lane)
            if not group.live:
                self._start_turn(group)
        cost = entry.cost
        lane.entries.append(entry)
        group.live += 1
        group.cost += cost
        self.size += 1
        self.cost += cost
        entry._lane = lane
        if entry.deadline is not None:
            self._timed += 1
            heapq.heappush(self._deadlines, (entry.deadline, next(self._sequence), entry))

    def head(self, before: int | None = None) -> EntryT | None:
        """Return the entry whose turn it is, without taking it; expired ones are passed over.

        Args:
            before: Only of the classes before this priority; None: of all.
        """
        if self._deadlines:
            self._sweep()
        lane = self._next_lane() if before is None else self._next_lane_before(before)
        if lane is None:
            return None
        head: EntryT = lane.entries[0]
        return head

    def pick(self, entry: EntryT) -> None:
        """Take one waiting entry, whatever its place, and charge its tenant.

        Raises:
            ValueError: The entry is not waiting.
        """
        lane = entry._lane
        if lane is None:
            raise ValueError("the entry is not waiting: it was taken or removed, or has expired")
        self._serve(entry, lane, self._clock())

    def take(
        self, budget: int | None = None, max_records: int | None = None, *, padded: bool = False
    ) -> list[EntryT]:
        """Take the entries whose turn it is, in order, as many as fit together.

        An entry that costs more than the whole budget is taken alone.

        Args:
            budget: Most cost of all together; None: no bound.
            max_records: Most entries; None: no bound.
            padded: The cost of all together is that of the costliest times their number, not the sum.
        """
        if self._deadlines:
            self._sweep()
        now = self._clock()
        batch: list[EntryT] = []
        total = longest = 0
        while max_records is None or len(batch) < max_records:
            lane = self._next_lane()
            if lane is None:
                break
            entry: EntryT = lane.entries[0]
            cost = entry.cost
            if padded:
                longest = max(longest, cost)
                total = longest * (len(batch) + 1)
            else:
                total += cost
            if budget is not None and total > budget and batch:
                break
            self._serve(entry, lane, now)
            batch.append(entry)
        return batch

    def peek(self, count: int) -> list[EntryT]:
        """Return the next `count` entries in the order in which `take` would return them."""
        self._sweep()
        return list(itertools.islice(self._walk(), count))

    def remove(self, entry: EntryT) -> bool:
        """Take an entry out unserved: it was cancelled. Return whether it was still waiting."""
        lane = entry._lane
        if lane is None:
            return False
        self._drop(entry, lane)
        return True

    def clear(self) -> list[EntryT]:
        """Take everything out unserved."""
        entries = list(self)
        for entry in entries:
            self.remove(entry)
        return entries

    def expire(self) -> list[EntryT]:
        """Take out and return the entries whose deadline has passed; each is returned once."""
        self._sweep()
        expired, self._expired = self._expired, []
        return expired

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a waiting entry."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2]._lane is None:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def settle(self, entry: EntryT, charged: int, used: int) -> None:
        """Charge the tenant of a taken entry for what it used, instead of what it was taken for."""
        group = self._classes.get(entry.priority)
        lane = group.lanes.get(entry.tenant) if group is not None else None
        if lane is None or used == charged:
            # A tenant that was forgotten starts at the level of the others: nothing to put right.
            return
        lane.counter += (used - charged) / lane.weight
        if lane.item is not None and lane.counter < lane.item[0]:
            lane.group.enlist(lane)

    def _next_lane(self) -> Lane | None:
        """Return the lane whose first entry is next; None: nothing waits."""
        turns = self._turns
        while turns:
            item = turns[0]
            group = item[2]
            if not group.live:
                heapq.heappop(turns)
                group.listed = False
                self._forget_class(group)
            elif item[0] != group.key and len(turns) > 1:
                heapq.heapreplace(turns, (group.key, group.priority, group))
            else:
                return group.first()
        return None

    def _next_lane_before(self, priority: int) -> Lane | None:
        """Return the lane whose first entry is next among the classes before a priority."""
        groups = [group for group in self._classes.values() if group.live and group.priority < priority]
        return min(groups, key=lambda group: (group.key, group.priority)).first() if groups else None

    def _serve(self, entry: EntryT, lane: Lane, now: float) -> None:
        """Charge a tenant for an entry and take it out."""
        lane.counter += (entry.cost or 1) / lane.weight
        if self._aging is not None:
            group = lane.group
            group.key = now + group.priority * self._aging
        self._drop(entry, lane)

    def _activate(self, lane: Lane) -> None:
        group = lane.group
        lane.counter = max(lane.counter, group.level())
        if lane.item is None:
            lane.joined = next(self._sequence)
            group.enlist(lane)

    def _start_turn(self, group: PriorityClass) -> None:
        group.key = self._key(group.priority)
        if not group.listed:
            group.listed = True
            heapq.heappush(self._turns, (group.key, group.priority, group))

    def _key(self, priority: int) -> float:
        # All classes age alike, so comparing these keys needs no clock.
        return float(priority) if self._aging is None else self._clock() + priority * self._aging

    def _drop(self, entry: EntryT, lane: Lane) -> None:
        group = lane.group
        entries = lane.entries
        cost = entry.cost
        entry._lane = None
        group.live -= 1
        group.cost -= cost
        self.size -= 1
        self.cost -= cost
        if entry.deadline is not None:
            self._timed -= 1
            if len(self._deadlines) > 2 * self._timed + 64:
                self._deadlines = [item for item in self._deadlines if item[2]._lane is not None]
                heapq.heapify(self._deadlines)
        if entries[0] is entry:
            entries.popleft()
            while lane.dead and entries[0]._lane is None:
                entries.popleft()
                lane.dead -= 1
        else:
            lane.dead += 1
            if lane.dead > len(entries) // 2 + 16:
                lane.entries = deque(lane.walk())
                lane.dead = 0
        if not lane.entries:
            self._retire(lane)

    def _retire(self, lane: Lane) -> None:
        """The tenant has nothing left in this class: remember it while it owes something."""
        group = lane.group
        if not group.live:
            group.floor = max(group.floor, lane.counter)
        if not lane.idle_listed:
            lane.idle_listed = True
            heapq.heappush(group.idle, (lane.counter, next(self._sequence), lane))
        group.forget_idle()
        self._forget_class(group)

    def _forget_class(self, group: PriorityClass) -> None:
        if not group.listed and not group.lanes:
            del self._classes[group.priority]

    def _sweep(self) -> None:
        if not self._deadlines:
            return
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)[2]
            if self.remove(entry):
                self._expired.append(entry)

    def _walk(self) -> Iterator[EntryT]:
        groups = [group for group in self._classes.values() if group.live]
        turns = [(group.key, group.priority, group.walk()) for group in groups]
        heapq.heapify(turns)
        while turns:
            _, priority, entries = turns[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(turns)
            else:
                yield entry
                heapq.heapreplace(turns, (self._key(priority), priority, entries))
