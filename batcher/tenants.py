"""The tenants of a queue: their weights, their shares of it, and when their refused records come back."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
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
        weight: Its share in relation to the others.
        charge: What a unit of cost adds to its counters.
        backlogs: Tiers in which records of it wait, for space too.
        size: Those that count against the bounds.
        cost: Their cost.
        parked: Backlogs with entries that wait for space, while its share of the queue has none.
        returns: Times at which the next of its refused records should come back, by priority.
        left_at: Time at which its last entry left.
    """

    name: str
    weight: float = 0.0
    charge: int = UNIT
    backlogs: int = 0
    size: int = 0
    cost: int = 0
    parked: list[Any] = field(default_factory=list)
    returns: dict[int, float] = field(default_factory=dict)
    left_at: float = 0.0


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
