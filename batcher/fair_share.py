"""The records of one priority, in lanes by tenant: what makes the queue fair."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Any

MAX_IDLE_TENANTS = 10_000
"""Tenants without records that one priority class remembers at most."""


class Queued:
    """What the queue must know of a record; a base without fields of its own.

    Attributes:
        cost: What the record costs, in whole units (tokens).
        priority: Lower goes first.
        tenant: Whose it is.
        deadline: Time on the queue's clock by which it must have been taken; None: any time.
        returning: It was refused before, and comes back.
    """

    __slots__ = ()

    returning: bool = False

    cost: int
    priority: int
    tenant: str
    deadline: float | None
    _lane: "Lane | None"

    @property
    def waiting(self) -> bool:
        """Whether it is in the queue: not yet taken, removed or expired."""
        return self._lane is not None


class Lane:
    """One tenant's records inside one priority class.

    `counter` is the tenant's virtual token counter: the cost it was served, divided by its weight.
    `dead` counts the entries that were removed and not yet reached. `item` is the one valid item of this
    lane in the heap of its class; other items are leftovers.
    """

    __slots__ = ("counter", "dead", "entries", "group", "idle_listed", "item", "joined", "tenant", "weight")

    def __init__(self, group: "PriorityClass", tenant: str, weight: float) -> None:
        self.group = group
        self.tenant = tenant
        self.weight = weight
        self.counter = 0.0
        self.entries: deque[Any] = deque()
        self.dead = 0
        self.joined = 0
        self.item: tuple[float, int, Lane] | None = None
        self.idle_listed = False

    def walk(self) -> Iterator[Any]:
        return (entry for entry in self.entries if entry._lane is not None)


class PriorityClass:
    """The records of one priority, in lanes by tenant.

    `floor` is the counter of the tenant that left last: where the next one starts if it finds nobody.
    `key` says when it is this class's turn: the lowest goes first.
    """

    __slots__ = ("active", "cost", "floor", "idle", "key", "lanes", "listed", "live", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.lanes: dict[str, Lane] = {}
        self.active: list[tuple[float, int, Lane]] = []
        self.idle: list[tuple[float, int, Lane]] = []
        self.floor = 0.0
        self.live = 0
        self.cost = 0
        self.key = 0.0
        self.listed = False

    def enlist(self, lane: Lane) -> None:
        """Put a lane at its place among the active ones, or at a lower place than it had."""
        lane.item = (lane.counter, lane.joined, lane)
        heapq.heappush(self.active, lane.item)
        if len(self.active) > 2 * len(self.lanes) + 64:
            self.active = [item for item in self.active if item is item[2].item]
            heapq.heapify(self.active)

    def first(self) -> Lane | None:
        """Return the lane that is served next: the lowest counter, then the longest active."""
        active = self.active
        while active:
            item = active[0]
            lane = item[2]
            if item is not lane.item:
                heapq.heappop(active)
            elif not lane.entries:
                heapq.heappop(active)
                lane.item = None
            elif item[0] == lane.counter or len(active) == 1:
                return lane
            else:
                # Counters mostly rise, so an item is put right only when it comes to the top.
                lane.item = (lane.counter, lane.joined, lane)
                heapq.heapreplace(active, lane.item)
        return None

    def level(self) -> float:
        """Return the counter at which a tenant starts that we have never seen."""
        lane = self.first()
        return self.floor if lane is None else lane.counter

    def forget_idle(self) -> None:
        """Drop the tenants that would start at the same counter if we had never seen them."""
        level = self.level()
        idle = self.idle
        while idle and (idle[0][0] <= level or len(idle) > MAX_IDLE_TENANTS):
            lane = heapq.heappop(idle)[2]
            lane.idle_listed = False
            if lane.entries:
                continue
            if lane.counter > level and len(idle) < MAX_IDLE_TENANTS:
                lane.idle_listed = True
                heapq.heappush(idle, (lane.counter, lane.joined, lane))
            else:
                del self.lanes[lane.tenant]
                lane.item = None

    def walk(self) -> Iterator[Any]:
        """Yield the entries in the order in which they would be taken."""
        heads = [
            (lane.counter, lane.joined, lane.weight, lane.walk())
            for lane in self.lanes.values()
            if lane.entries
        ]
        if len(heads) == 1:
            yield from heads[0][3]
            return
        heapq.heapify(heads)
        while heads:
            counter, joined, weight, entries = heads[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(heads)
            else:
                yield entry
                heapq.heapreplace(heads, (counter + (entry.cost or 1) / weight, joined, weight, entries))
