"""Fair order inside a queue: whose turn it is among tiers, and among the tenants of a tier."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from batcher.tenants import MAX_IDLE_TENANTS, Tenant

SLACK = 64
"""Leftovers that are kept beside as many as are in use, so that clearing up is rare."""

TurnT = TypeVar("TurnT", bound="Turn")


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """Something that waits for its turn: the lowest key goes first, then the lowest order.

    Attributes:
        total: Records that wait in it.
        item: Its place in the heap.
    """

    key: float = 0
    order: int = 0
    total: int = 0
    item: Any = None


class Turns(Generic[TurnT]):
    """Decides whose turn it is, of what waits."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, TurnT]] = []
        self._sequence = itertools.count()
        self._most = SLACK

    def push(self, thing: TurnT) -> None:
        """Take in what begins to wait, or whose key has become lower."""
        thing.item = (thing.key, thing.order, next(self._sequence), thing)
        heapq.heappush(self._heap, thing.item)
        if len(self._heap) > self._most:
            self._heap = [item for item in self._heap if item is item[3].item]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SLACK

    def first(self) -> TurnT | None:
        """Return the one whose turn it is."""
        heap = self._heap
        while heap:
            item = heap[0]
            thing = item[3]
            if item is not thing.item:
                heapq.heappop(heap)
            elif not thing.total:
                heapq.heappop(heap)
                thing.item = None
            elif item[0] == thing.key or len(heap) == 1:
                return thing
            else:
                # Keys mostly rise, so an item is put right only when it comes to the top.
                thing.item = (thing.key, item[1], item[2], thing)
                heapq.heapreplace(heap, thing.item)
        return None


@dataclass(slots=True, eq=False)
class Backlog(Turn):
    """The entries of one tenant in one tier, by arrival; the key is the cost it was served, by its weight.

    The entries are linked to one another, so that any of them leaves at once.

    Attributes:
        first: The entry that came first.
        last: The entry that came last.
        outside: The first entry that waits for space; all after it do too. None: all count.
    """

    tier: "Tier"
    tenant: Tenant
    first: Any = None
    last: Any = None
    outside: Any = None

    def __iter__(self) -> Iterator[Any]:
        entry = self.first
        while entry is not None:
            following = entry._next
            yield entry
            entry = following


@dataclass(slots=True, eq=False)
class Tier(Turn):
    """The entries of one priority, as backlogs by tenant; the key says when its turn is.

    Attributes:
        total_cost: Cost of the records that wait in it.
        outside: Those of them that wait for space.
        outside_cost: Their cost.
        top: The highest key with which a backlog became empty: once all are, nothing is owed.
        claims: Backlogs with entries that wait for space, in turn.
        idle: Backlogs without entries that are remembered while they owe something.
        joined: How often a tenant has joined.
    """

    priority: int
    claims: OrderedDict[Backlog, None]
    total_cost: int = 0
    outside: int = 0
    outside_cost: int = 0
    top: float = 0
    backlogs: dict[str, Backlog] = field(default_factory=dict)
    turns: Turns[Backlog] = field(default_factory=Turns)
    idle: OrderedDict[Backlog, None] = field(default_factory=OrderedDict)
    joined: int = 0

    def join(self, tenant: Tenant) -> Backlog:
        """Return the backlog of a tenant that is about to get an entry; at the level of the others."""
        backlog = self.backlogs.get(tenant.name)
        if backlog is None:
            backlog = self.backlogs[tenant.name] = Backlog(self, tenant)
        self.idle.pop(backlog, None)
        backlog.tenant = tenant
        first = self.turns.first()
        level = self.top if first is None else first.key
        if level >= backlog.key:
            # It owes nothing, and comes behind the others.
            backlog.key, backlog.item = level, None
        if backlog.item is None:
            self.joined += 1
            backlog.order = self.joined
            self.turns.push(backlog)
        return backlog

    def retire(self, backlog: Backlog) -> None:
        """Remember a backlog that has no entries left while it was served more than the others."""
        if backlog.key > self.top:
            self.top = backlog.key
        idle = self.idle
        idle[backlog] = None
        if len(idle) <= SLACK:
            return
        first = self.turns.first()
        while len(idle) > SLACK:
            backlog = next(iter(idle))
            if first is not None and backlog.key > first.key and len(idle) <= MAX_IDLE_TENANTS:
                break
            del idle[backlog], self.backlogs[backlog.tenant.name]
            backlog.item = None

    def walk(self) -> Iterator[Any]:
        """Yield the entries in the order in which they would be taken."""
        heads = [
            (backlog.key, backlog.order, backlog.tenant.charge, iter(backlog))
            for backlog in self.backlogs.values()
            if backlog.total
        ]
        heapq.heapify(heads)
        while heads:
            key, order, charge, entries = heads[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(heads)
            else:
                yield entry
                heapq.heapreplace(heads, (key + (entry.cost or 1) * charge, order, charge, entries))
