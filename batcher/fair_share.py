"""Fair order inside a queue: whose turn it is among tiers and tenants, and each tenant's share of it."""

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from batcher import checks

SLACK = 64  # leftovers that are kept beside as many as are in use, so that clearing up is rare
UNIT = 1 << 20  # charge to a tenant of weight 1 per unit of cost: a whole number keeps its precision
MAX_IDLE_TENANTS = 10_000  # tenants without entries that are remembered at most
RECENT_S = 10.0  # seconds for which a tenant without entries still has its share of the queue

# The times at which refused records should come back.
RETURNS_SHARE = 1 / 3  # share of a tenant's service that is set aside for them; the rest is for new ones
SPREAD = 0.25  # how far a time is moved at random, as a share of it
LATEST_S = 60.0  # seconds after which it is at the latest, unless the wait is longer
MAX_TIERS = 64  # tiers of a tenant whose times are remembered

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
class Tenant:
    """One tenant of a queue, over all tiers.

    Attributes:
        weight: Its share in relation to the others.
        charge: What a unit of cost adds to its counters.
        backlogs: Tiers in which records of it wait, for space too.
        size: Those that count against the bounds.
        cost: Their cost.
        returns: Times at which the next of its refused records should come back, by priority.
        left_at: Time at which its last entry left.
    """

    name: str
    weight: float = 0.0
    charge: int = UNIT
    backlogs: int = 0
    size: int = 0
    cost: int = 0
    returns: dict[int, float] = field(default_factory=dict)
    left_at: float = 0.0

    def retry_after(self, priority: int, wait_s: float, own: int, now: float) -> float:
        """Return the seconds after which a record that is refused now should come back.

        The records of one tenant come back one after the other, as fast as the tenant is served, and not
        before the wait is over, nor before those of the same or a higher tier; the demand of one tenant
        doesn't delay another. A random part spreads those of several tenants.

        Args:
            priority: Its tier.
            wait_s: Seconds that it would wait if it were let in.
            own: Records of the tenant that wait in that tier.
            now: The time.
        """
        returns = self.returns
        if priority not in returns:
            if len(returns) > MAX_TIERS:
                returns.clear()
            returns[priority] = max((at for above, at in returns.items() if above < priority), default=now)
        at = min(max(now + wait_s, returns[priority]), now + max(wait_s, LATEST_S))
        returns[priority] = at
        for tier in returns:
            if tier >= priority:
                returns[tier] = max(returns[tier], now) + wait_s / (own + 1) / RETURNS_SHARE
        return (at - now) * (1 + SPREAD * random.random())


@dataclass(slots=True, eq=False)
class Backlog(Turn):
    """The entries of one tenant in one tier, by arrival; the key is the cost it was served, by its weight.

    The entries are linked to one another, so that any of them leaves at once.

    Attributes:
        first: The entry that came first.
        last: The entry that came last.
        outside: Entries that wait for space.
    """

    tier: "Tier"
    tenant: Tenant
    first: Any = None
    last: Any = None
    outside: int = 0

    def append(self, entry: Any) -> None:
        """Put an entry behind the others."""
        entry._place = self
        last = entry._previous = self.last
        if last is None:
            self.first = entry
        else:
            last._next = entry
        self.last = entry
        self.total += entry.records

    def unlink(self, entry: Any) -> None:
        """Take an entry out, wherever it is."""
        before, after = entry._previous, entry._next
        if before is None:
            self.first = after
        else:
            before._next = after
        if after is None:
            self.last = before
        else:
            after._previous = before
        entry._place = entry._previous = entry._next = None
        self.total -= entry.records

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
        waiting: Backlogs with entries; the others are remembered while they owe something.
        joined: How often a tenant has joined.
        most: Backlogs from which on those that need not be remembered are looked for.
    """

    priority: int
    total_cost: int = 0
    outside: int = 0
    outside_cost: int = 0
    top: float = 0
    backlogs: dict[str, Backlog] = field(default_factory=dict)
    turns: Turns[Backlog] = field(default_factory=Turns)
    waiting: int = 0
    joined: int = 0
    most: int = SLACK

    def join(self, tenant: Tenant) -> Backlog:
        """Return the backlog of a tenant that is about to get an entry; at the level of the others."""
        backlog = self.backlogs.get(tenant.name)
        if backlog is None:
            backlog = self.backlogs[tenant.name] = Backlog(self, tenant)
        self.waiting += 1
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
        self.top = max(self.top, backlog.key)
        self.waiting -= 1
        if len(self.backlogs) <= self.most:
            return
        first = self.turns.first()
        level = math.inf if first is None else first.key
        idle = sorted((each for each in self.backlogs.values() if not each.total), key=lambda each: each.key)
        # Those that were served no more than the others owe nothing; of too many, the least served go too.
        owe_nothing = bisect_right(idle, level, key=lambda each: each.key)
        for each in idle[: max(owe_nothing, len(idle) - MAX_IDLE_TENANTS)]:
            del self.backlogs[each.tenant.name]
            each.item = None
        self.most = 2 * len(self.backlogs) + SLACK

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
        """Return a tenant that is about to have entries in one more tier."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
            self._weigh_again(tenant)
        elif not tenant.backlogs:
            self._idle.pop(name, None)
        tenant.backlogs += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Take in that a tenant has no entries any more in one of its tiers."""
        tenant.backlogs -= 1
        if tenant.backlogs:
            return
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
