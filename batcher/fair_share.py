"""Fair order inside a queue: whose turn it is among tenants, and each tenant's share of the queue."""

import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from batcher import checks

SLACK = 64  # items of a heap that are out of date beside as many as are not, so that clearing up is rare
UNIT = 1 << 20  # charge to a tenant of weight 1 per unit of cost: a whole number keeps its precision
MAX_IDLE_TENANTS = 10_000  # tenants without entries that are remembered at most
RECENT_S = 10.0  # seconds for which a tenant without entries still has its share of the queue
RETURNS_SHARE = 1 / 3  # share of a tenant's service that is set aside for refused records that come back
SPREAD = 0.25  # how far the time at which one should come back is moved at random, as a share of it
LATEST_S = 60.0  # seconds after which that is at the latest, unless the wait is longer
MAX_TIERS = 64  # tiers of a tenant for which such times are remembered


_arrival, _served = attrgetter("_next._order"), attrgetter("key")


class Heap(list[tuple[Any, int, Any]]):
    """Things by a key of theirs, the lowest first; things with the same key in order of arrival.

    A key may rise at any time: it is put right when the thing comes to the top. A thing whose key has fallen
    is pushed again. A thing that leaves has no `_item` from then on; its old items go at the top, or when the
    items have doubled.
    """

    _sequence = itertools.count()
    _most = SLACK

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self._key = key

    def push(self, thing: Any) -> None:
        """Put a thing in, or into another place; it keeps its place among things with the same key."""
        order = next(self._sequence) if thing._item is None else thing._item[1]
        thing._item = item = (self._key(thing), order, thing)
        heapq.heappush(self, item)
        if len(self) > self._most:
            self[:] = [item for item in self if item is item[2]._item]
            heapq.heapify(self)
            self._most = 2 * len(self) + SLACK

    def top(self) -> Any:
        """Return the thing with the lowest key; None: there is none."""
        while self:
            item = self[0]
            thing = item[2]
            if item is not thing._item:
                heapq.heappop(self)
            elif item[0] != (key := self._key(thing)):
                thing._item = (key, item[1], thing)
                heapq.heapreplace(self, thing._item)
            else:
                return thing
        return None


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant of a queue, over all tiers."""

    name: str
    weight: float = 0.0  # its share in relation to the others
    charge: int = UNIT  # what a unit of cost adds to the keys of its accounts
    backlogs: int = 0  # tiers in which records of it wait, for space too
    size: int = 0  # records that count against the bounds
    cost: int = 0  # their cost
    returns: dict[int, float] = field(default_factory=dict)  # when refused records come next, by priority


class Needs:
    """The needs that were refused, and the backlogs that are passed by for one of them."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.wanted: dict[str, int] = {}  # backlogs by their needs
        self.passed: set[Backlog] = set()


@dataclass(slots=True, eq=False)
class Backlog:
    """The entries of one tenant in one tier that have the same needs, by arrival.

    They stand in a ring with the backlog itself: any entry leaves at once.
    """

    account: "Account"
    needs: tuple[str, ...]
    _item: Any = None
    _next: Any = field(init=False)
    _previous: Any = field(init=False)

    def __post_init__(self) -> None:
        self._next = self._previous = self


@dataclass(slots=True, eq=False)
class Account:
    """The service that a tenant got in one tier, and its backlogs there."""

    tenant: Tenant
    tier: Any = None  # as long as it has entries
    key: float = -math.inf  # the cost that it was served, by its weight: the one with the lowest goes first
    total: int = 0  # records that wait
    outside: int = 0  # entries that wait for space
    # As long as it has entries: the backlogs by their needs, and by the arrival of their first entry, but for
    # those passed by.
    backlogs: dict[tuple[str, ...], Backlog] = field(init=False)
    heads: Heap = field(init=False)
    _item: Any = None

    def first(self, needs: Needs) -> Any:
        """Return the first entry that has no refused need, or None; backlogs that are passed by are noted."""
        while (backlog := self.heads.top()) is not None:
            if needs.refused.isdisjoint(backlog.needs):
                return backlog._next
            heapq.heappop(self.heads)
            needs.passed.add(backlog)
        return None

    def entries(self) -> Iterator[Any]:
        """Yield all entries, in no particular order."""
        for backlog in self.backlogs.values():
            entry = backlog._next
            while entry is not backlog:
                following = entry._next
                yield entry
                entry = following

    def turns(self) -> Iterator[tuple[float, int, Any]]:
        """Yield the entries in their order, each after the key of its turn; none of them has needs."""
        key, order = self.key, self._item[1]
        for entry in self.entries():
            yield key, order, entry
            key += (entry.cost or 1) * self.tenant.charge

    def retry_after(self, priority: int, wait_s: float, now: float) -> float:
        """Return in how many seconds a record that is refused now, and would wait so long, should come."""
        known = self.tenant.returns if len(self.tenant.returns) <= MAX_TIERS else {}
        returns = self.tenant.returns = {tier: at for tier, at in known.items() if at > now}
        before = (at for tier, at in returns.items() if tier <= priority)
        at = returns[priority] = min(max((now + wait_s, *before)), now + max(wait_s, LATEST_S))
        for tier in returns:
            # One comes after the other, as fast as the tenant is served; those of a higher tier come first.
            if tier >= priority:
                returns[tier] += wait_s / (self.total + 1) / RETURNS_SHARE
        return (at - now) * (1 + SPREAD * random.random())


@dataclass(slots=True, eq=False)
class Tier:
    """The entries of one priority, as accounts of tenants."""

    turn: tuple[float, int]  # when its turn is, and its priority: the lowest goes first
    needs: Needs  # those of the queue
    size: int = 0  # records that count against the bounds
    cost: int = 0  # their cost
    outside: int = 0  # records that wait for space
    outside_cost: int = 0  # their cost
    accounts: dict[str, Account] = field(default_factory=dict)
    turns: Heap = field(default_factory=lambda: Heap(_served))  # the accounts, but for those passed by
    level: float = 0  # the highest key of an account at the time that it was served
    idle: dict[str, Account] = field(default_factory=dict)  # those without entries, for what they were served

    def first(self) -> Any:
        """Return the entry whose turn it is; None: all have a refused need."""
        while (account := self.turns.top()) is not None:
            if (entry := account.first(self.needs)) is not None:
                return entry
            heapq.heappop(self.turns)
        return None

    def open(self, backlog: Backlog) -> None:
        """Give a backlog its turns: it is new, or was passed by."""
        backlog.account.heads.push(backlog)
        self.turns.push(backlog.account)

    def join(self, tenant: Tenant) -> Account:
        """Return the account of a tenant that gets an entry: not ahead of the tenants that have entries."""
        first = self.first()
        account = self.idle.pop(tenant.name, None) or Account(tenant)
        account.tenant, account.tier, account.backlogs, account.heads = tenant, self, {}, Heap(_arrival)
        account.key = max(account.key, self.level if first is None else first._place.key)
        self.accounts[tenant.name] = account
        return account

    def retire(self, account: Account) -> None:
        """Note that an account has no entries left; no cycle is left to collect either."""
        account._item = account.tier = None
        del account.backlogs, account.heads
        self.idle[account.tenant.name] = self.accounts.pop(account.tenant.name)
        if len(self.idle) > MAX_IDLE_TENANTS:
            for name in sorted(self.idle, key=lambda name: self.idle[name].key)[: MAX_IDLE_TENANTS // 2]:
                del self.idle[name]


class Tenants:
    """The tenants that have entries, or had of late, and their weights."""

    def __init__(self, clock: Callable[[], float], weights: Mapping[str, float]) -> None:
        self._clock = clock
        self._own_weights: OrderedDict[str, float] = OrderedDict()
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()  # when those without entries had their last one
        self._weight = 0.0
        self.set_weights(weights)

    def join(self, name: str) -> Tenant:
        """Return a tenant that is about to have entries in one more tier."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
            self._weigh_again(tenant)
        self._idle.pop(name, None)
        tenant.backlogs += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Note that a tenant has no entries any more in one of its tiers."""
        tenant.backlogs -= 1
        if not tenant.backlogs:
            self._idle[tenant.name] = self._clock()
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._forget_first()

    def share(self, tenant: Tenant) -> float:
        """Return a tenant's share by weight, 0 to 1, among the tenants with entries now or lately."""
        before = self._clock() - RECENT_S
        while self._idle and next(iter(self._idle.values())) < before:
            self._forget_first()
        return tenant.weight / self._weight if self._weight > tenant.weight else 1.0

    def weigh(self, name: str, weight: float | None) -> None:
        """Give a tenant a weight of its own; None: takes it away."""
        checks.tenant(name)
        if self._own_weights.get(name) == weight:
            return
        if weight is None:
            del self._own_weights[name]
        else:
            checks.weight("weight", weight)
            self._own_weights[name] = weight
            if len(self._own_weights) > MAX_IDLE_TENANTS:
                self._own_weights.popitem(last=False)
        if tenant := self._tenants.get(name):
            self._weigh_again(tenant)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of the tenants that have no weight of their own."""
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
        tenant = self._tenants.pop(self._idle.popitem(last=False)[0])
        self._weight = self._weight - tenant.weight if self._tenants else 0.0
