"""Shares of the tenants in the rows that are in flight."""

from collections import Counter
from collections.abc import Collection


class Shares:
    """Turns of the tenants, by weight.

    The tenant with the fewest rows in flight by its weight is next. Among equals, it is the one with the
    fewest rows so far by its weight (start-time fair queueing), so that tenants take turns at a limit of one
    row too. A tenant that joins has no credit.
    """

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._now = 0.0
        self._next: dict[str, float] = {}

    def turn(self, tenant: str, weight: float) -> tuple[float, float]:
        """Return the place of a tenant among others: the least one is next.

        Args:
            tenant: The tenant.
            weight: Its share in relation to the others.
        """
        return self._in_flight[tenant] / weight, max(self._now, self._next.get(tenant, 0.0))

    def start(self, tenant: str, weight: float) -> None:
        """Note a row that is in flight from now on."""
        self._now = self.turn(tenant, weight)[1]
        self._next[tenant] = self._now + 1 / weight
        self._in_flight[tenant] += 1

    def end(self, tenant: str) -> None:
        """Note the end of a row."""
        self._in_flight[tenant] -= 1

    def keep(self, tenants: Collection[str]) -> None:
        """Forget all other tenants that have no row in flight."""
        for tenant in self._next.keys() - tenants:
            if not self._in_flight[tenant]:
                del self._next[tenant], self._in_flight[tenant]
