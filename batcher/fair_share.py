"""Fair order inside a queue: whose turn it is among tiers, and among the tenants of a tier."""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from batcher import checks

MAX_IDLE_TENANTS = 10_000
"""Tenants without entries that are remembered at most."""

RECENT_S = 10.0
"""Seconds for which a tenant without entries still has its share of the queue."""

UNIT = 1 << 20
"""Charge to a tenant of weight 1 per unit of cost: whole numbers, so that no precision is lost."""

SLACK = 64
"""Leftovers that a heap may hold beside as many as it has items."""

TurnT = TypeVar("TurnT", bound="Turn")


@dataclass(slots=True, eq=False, kw_only=True)
class Held:
    """Records that wait, and those among them that wait for space in the queue, with their cost."""

    total: int = 0
    total_cost: int = 0
    outside: int = 0
    outside_cost: int = 0

    @property
    def size(self) -> int:
        """Records that count against the bounds."""
        return self.total - self.outside

    @property
    def cost(self) -> int:
        """The cost of the records that count against the bounds."""
        return self.total_cost - self.outside_cost


@dataclass(slots=True, eq=False, kw_only=True)
class Turn(Held):
    """Something that waits for its turn: the lowest key goes first, then the lowest order.

    Attributes:
        item: Its place in the heap.
    """

    key: float = 0
    order: int = 0
    item: Any = None


class Turns(Generic[TurnT]):
    """Decides whose turn it is, of what waits."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, int, TurnT]] = []
        self._sequence = itertools.count()
        self._most = SLACK

    def push(self, thing: TurnT) -> None:
        """Take in what begins to wait, or whose key has become lower."""
        thing.item = (thing.key, thing.order, next(self._sequence), thing)
        heapq.heappush(self.heap, thing.item)
        if len(self.heap) > self._most:
            self.heap = [item for item in self.heap if item is item[3].item]
            heapq.heapify(self.heap)
            self._most = 2 * len(self.heap) + SLACK

    def first(self) -> TurnT | None:
        """Return the one whose turn it is."""
        heap = self.heap
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


class Fifo:
    """Entries in the order of their arrival.

    Attributes:
        entries: Begins with the first one, unless there is none.
        gone: Those that were taken out between others, and were not reached yet.
    """

    __slots__ = ("entries", "gone")

    def __init__(self) -> None:
        self.entries: deque[Any] = deque()
        self.gone: set[Any] = set()

    def __iter__(self) -> Iterator[Any]:
        return (entry for entry in self.entries if entry not in self.gone)

    def append(self, entry: Any) -> None:
        """Put an entry behind the others."""
        if self.gone and entry in self.gone:
            self._sweep()
        self.entries.append(entry)

    def discard(self, entry: Any) -> None:
        """Take one entry out."""
        entries, gone = self.entries, self.gone
        if entries[0] is entry:
            entries.popleft()
            while gone and entries[0] in gone:
                gone.remove(entries.popleft())
        elif entries[-1] is entry:
            entries.pop()
        else:
            gone.add(entry)
            if len(gone) > len(entries) // 2 + SLACK:
                self._sweep()

    def _sweep(self) -> None:
        self.entries = deque(self)
        self.gone.clear()


NONE = Fifo()
"""Stays empty: most backlogs never have an entry outside."""


@dataclass(slots=True, eq=False)
class Tenant(Held):
    """One tenant of a queue, over all tiers.

    Attributes:
        charge: What a unit of cost adds to its counters.
        parked: Backlogs with entries outside that its share of the queue has no space for.
        returns: Times at which the next of its refused records should come back, by priority.
        left_at: Time at which its last entry left.
    """

    name: str
    weight: float = 1.0
    charge: int = UNIT
    parked: "list[Backlog]" = field(default_factory=list)
    returns: dict[int, float] = field(default_factory=dict)
    left_at: float = 0.0


@dataclass(slots=True, eq=False)
class Backlog(Turn):
    """The entries of one tenant in one tier; the key is the cost that it was served, by its weight.

    Attributes:
        inside: Entries that count against the bounds.
        waiting: Entries that wait for space, all later than those inside.
    """

    tier: "Tier"
    tenant: Tenant
    inside: Fifo = field(default_factory=Fifo)
    waiting: Fifo = NONE

    def wait(self, entry: Any) -> None:
        """Put an entry behind those that wait for space."""
        if self.waiting is NONE:
            self.waiting = Fifo()
        self.waiting.append(entry)
        self.tier.claims[self] = None

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self.inside, self.waiting)


@dataclass(slots=True, eq=False)
class Tier(Turn):
    """The entries of one priority, as backlogs by tenant; the key says when its turn is.

    Attributes:
        claims: Backlogs with entries that wait for space, in turn.
        joined: How often a tenant has joined.
        idle: Backlogs without entries that are remembered while they owe something.
    """

    priority: int
    claims: OrderedDict[Backlog, None]
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
        level = self.turns.first()
        if level is not None and level.key >= backlog.key:
            # It owes nothing, and comes behind the others.
            backlog.key, backlog.item = level.key, None
        if backlog.item is None:
            self.joined += 1
            backlog.order = self.joined
            self.turns.push(backlog)
        return backlog

    def retire(self, backlog: Backlog) -> None:
        """Remember a backlog that has no entries left while it was served more than the others."""
        self.idle[backlog] = None
        first = self.turns.first()
        while self.idle:
            backlog = next(iter(self.idle))
            if first is not None and backlog.key > first.key and len(self.idle) <= MAX_IDLE_TENANTS:
                break
            del self.idle[backlog], self.backlogs[backlog.tenant.name]
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
            key, number, charge, entries = heads[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(heads)
            else:
                yield entry
                heapq.heapreplace(heads, (key + (entry.cost or 1) * charge, number, charge, entries))


class Tenants:
    """The tenants that have entries, or had of late, and their weights."""

    def __init__(self, clock: Callable[[], float], weights: Mapping[str, float]) -> None:
        self._clock = clock
        self._own_weights: OrderedDict[str, float] = OrderedDict()
        self._tenants: dict[str, Tenant] = {}
        # Those without entries, by the time at which they left.
        self._idle: OrderedDict[str, Tenant] = OrderedDict()
        self._weight = 0.0
        self.set_weights(weights)

    def get(self, name: str) -> Tenant | None:
        """Return a tenant that is known."""
        return self._tenants.get(name)

    def join(self, name: str) -> Tenant:
        """Return a tenant that is about to have entries."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, 0.0)
            self._weigh_again(tenant)
        elif not tenant.total:
            self._idle.pop(name, None)
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Take in that a tenant has no entries any more."""
        tenant.left_at = self._clock()
        self._idle[tenant.name] = tenant
        if len(self._idle) > MAX_IDLE_TENANTS:
            self._forget_first()

    def share(self, tenant: Tenant) -> float:
        """Return a tenant's share by weight, 0 to 1, among those that have entries or had of late."""
        if self._idle:
            before = self._clock() - RECENT_S
            while self._idle and next(iter(self._idle.values())).left_at < before:
                self._forget_first()
        return tenant.weight / self._weight if self._weight > tenant.weight else 1.0

    def weigh(self, name: str, weight: float | None) -> None:
        """Give a tenant a weight of its own; None: takes it away."""
        if type(name) is str and self._own_weights.get(name) == weight:
            return
        checks.tenant(name)
        if weight is None:
            self._own_weights.pop(name, None)
        else:
            checks.weight("weight", weight)
            self._own_weights[name] = weight
            if len(self._own_weights) > MAX_IDLE_TENANTS:
                self._own_weights.popitem(last=False)
        if tenant := self._tenants.get(name):
            self._weigh_again(tenant)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of those that have none of their own."""
        checks.weights("tenant_weights", weights)
        self._weights = dict(weights)
        for tenant in self._tenants.values():
            self._weigh_again(tenant)

    def _weigh_again(self, tenant: Tenant) -> None:
        self._weight -= tenant.weight
        tenant.weight = self._own_weights.get(tenant.name) or self._weights.get(tenant.name, 1.0)
        tenant.charge = max(1, round(UNIT / tenant.weight))
        self._weight += tenant.weight

    def _forget_first(self) -> None:
        name, tenant = self._idle.popitem(last=False)
        del self._tenants[name]
        self._weight = self._weight - tenant.weight if self._tenants else 0.0
