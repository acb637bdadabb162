"""Fair order inside a tier: the entries of one priority, by tenant."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batcher import checks

MAX_IDLE_TENANTS = 10_000
"""Tenants without entries that are remembered at most."""

RECENT_S = 10.0
"""Seconds for which a tenant without entries still has its share of the queue."""

UNIT = 1 << 20
"""Charge to a tenant of weight 1 per unit of cost: whole numbers, so that no precision is lost."""


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant of a queue, over all tiers.

    Attributes:
        live: Its records that wait.
        cost: Their cost.
        outside: Those among them that wait for space in the queue.
        outside_cost: Their cost.
        parked: Backlogs with entries outside that its share of the queue has no space for.
        returns: Times at which the next of its refused records should come back, by priority.
        left_at: Time at which its last entry left.
    """

    name: str
    weight: float
    charge: int = field(init=False)
    live: int = 0
    cost: int = 0
    outside: int = 0
    outside_cost: int = 0
    parked: "list[Backlog]" = field(default_factory=list)
    returns: dict[int, float] = field(default_factory=dict)
    left_at: float = 0.0

    def __post_init__(self) -> None:
        self.set_weight(self.weight)

    def set_weight(self, weight: float) -> None:
        """Set the tenant's share in relation to the others."""
        self.weight = weight
        self.charge = max(1, round(UNIT / weight))


class Tenants:
    """The tenants that have entries, or had of late, and their weights.

    Args:
        clock: Returns the time in seconds.
        weights: Share of a tenant in relation to the others; 1.0 where not given.

    Raises:
        ValueError: A weight is out of range.
    """

    def __init__(self, clock: Callable[[], float], weights: Mapping[str, float]) -> None:
        checks.weights("tenant_weights", weights)
        self._clock = clock
        self._weights = dict(weights)
        self._own_weights: OrderedDict[str, float] = OrderedDict()
        self._tenants: dict[str, Tenant] = {}
        # Those without entries, by the time at which they left.
        self._idle: OrderedDict[str, Tenant] = OrderedDict()
        self._weight = 0.0

    def __len__(self) -> int:
        return len(self._tenants)

    def get(self, name: str) -> Tenant | None:
        """Return a tenant that is known."""
        return self._tenants.get(name)

    def join(self, name: str) -> Tenant:
        """Return a tenant that is about to have entries."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weight_of(name))
            self._weight += tenant.weight
        elif not tenant.live:
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
        self._weigh_again(name)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of those that have none of their own."""
        checks.weights("tenant_weights", weights)
        self._weights = dict(weights)
        for name in self._tenants:
            self._weigh_again(name)

    def _weight_of(self, name: str) -> float:
        return self._own_weights.get(name) or self._weights.get(name, 1.0)

    def _weigh_again(self, name: str) -> None:
        if tenant := self._tenants.get(name):
            self._weight -= tenant.weight
            tenant.set_weight(self._weight_of(name))
            self._weight += tenant.weight

    def _forget_first(self) -> None:
        name, tenant = self._idle.popitem(last=False)
        del self._tenants[name]
        self._weight = self._weight - tenant.weight if self._tenants else 0.0


@dataclass(slots=True, eq=False)
class Backlog:
    """The entries of one tenant in one tier, in the order of their arrival.

    Attributes:
        counter: Its virtual token counter: the cost that it was served, by its weight.
        live: Its records: an entry may stand for several.
        removed: Entries that were removed and not yet reached.
        outside: Entries that wait for space in the queue.
        item: The one valid item of this backlog in the heap of its tier; other items are leftovers.
    """

    tier: "Tier"
    tenant: Tenant
    counter: int = 0
    live: int = 0
    joined: int = 0
    entries: deque[Any] = field(default_factory=deque)
    removed: set[Any] = field(default_factory=set)
    outside: OrderedDict[Any, None] = field(default_factory=OrderedDict)
    item: "tuple[int, int, Backlog] | None" = None
    idle_listed: bool = False

    def walk(self) -> Iterator[Any]:
        """Yield the entries in order."""
        return (entry for entry in self.entries if entry not in self.removed)

    def append(self, entry: Any) -> None:
        """Put an entry behind the others."""
        if entry in self.removed:
            self._sweep()
        self.entries.append(entry)

    def discard(self, entry: Any) -> None:
        """Take one entry out."""
        entries, removed = self.entries, self.removed
        if entries[0] is entry:
            entries.popleft()
            while removed and entries[0] in removed:
                removed.remove(entries.popleft())
        elif entries[-1] is entry:
            entries.pop()
        else:
            removed.add(entry)
            if len(removed) > len(entries) // 2 + 16:
                self._sweep()

    def _sweep(self) -> None:
        self.entries = deque(self.walk())
        self.removed.clear()


@dataclass(slots=True, eq=False)
class Tier:
    """The entries of one priority, as backlogs by tenant.

    Attributes:
        live: Records that wait.
        cost: Their cost.
        outside: Those among them that wait for space in the queue.
        outside_cost: Their cost.
        tenants: Tenants that have entries.
        key: Says when it is the turn of this tier: the lowest goes first.
    """

    priority: int
    key: float
    backlogs: dict[str, Backlog] = field(default_factory=dict)
    active: list[tuple[int, int, Backlog]] = field(default_factory=list)
    idle: list[tuple[int, int, Backlog]] = field(default_factory=list)
    live: int = 0
    cost: int = 0
    outside: int = 0
    outside_cost: int = 0
    tenants: int = 0

    def first(self) -> Backlog | None:
        """Return the backlog that is served next: the lowest counter, then the longest active."""
        active = self.active
        while active:
            item = active[0]
            backlog = item[2]
            if item is not backlog.item:
                heapq.heappop(active)
            elif not backlog.entries:
                heapq.heappop(active)
                backlog.item = None
            elif item[0] == backlog.counter or len(active) == 1:
                return backlog
            else:
                # Counters mostly rise, so an item is put right only when it comes to the top.
                backlog.item = (backlog.counter, backlog.joined, backlog)
                heapq.heapreplace(active, backlog.item)
        return None

    def join(self, backlog: Backlog, number: int) -> None:
        """Make a backlog active, that gets its first entry; it starts at the level of the others at least."""
        self.tenants += 1
        level = self.first()
        if level is not None and level.counter > backlog.counter:
            backlog.counter = level.counter
        if backlog.item is None:
            backlog.joined = number
            self.enlist(backlog)

    def enlist(self, backlog: Backlog) -> None:
        """Put a backlog at its place among the active ones, or at a lower place than it had."""
        backlog.item = (backlog.counter, backlog.joined, backlog)
        heapq.heappush(self.active, backlog.item)
        if len(self.active) > 2 * len(self.backlogs) + 64:
            self.active = [item for item in self.active if item is item[2].item]
            heapq.heapify(self.active)

    def retire(self, backlog: Backlog, number: int) -> None:
        """Make a backlog idle that has no entries left: it is remembered while it owes something."""
        self.tenants -= 1
        if not backlog.idle_listed:
            backlog.idle_listed = True
            heapq.heappush(self.idle, (backlog.counter, number, backlog))
        first = self.first()
        idle = self.idle
        while idle and (first is None or idle[0][0] <= first.counter or len(idle) > MAX_IDLE_TENANTS):
            backlog = heapq.heappop(idle)[2]
            backlog.idle_listed = False
            if backlog.entries:
                continue
            if first is not None and backlog.counter > first.counter and len(idle) < MAX_IDLE_TENANTS:
                # It was served since it was listed.
                backlog.idle_listed = True
                heapq.heappush(idle, (backlog.counter, backlog.joined, backlog))
            else:
                del self.backlogs[backlog.tenant.name]
                backlog.item = None

    def walk(self) -> Iterator[Any]:
        """Yield the entries in the order in which they would be taken."""
        heads = [
            (backlog.counter, backlog.joined, backlog.tenant.charge, backlog.walk())
            for backlog in self.backlogs.values()
            if backlog.entries
        ]
        if len(heads) == 1:
            yield from heads[0][3]
            return
        heapq.heapify(heads)
        while heads:
            counter, joined, charge, entries = heads[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(heads)
            else:
                yield entry
                heapq.heapreplace(heads, (counter + (entry.cost or 1) * charge, joined, charge, entries))
