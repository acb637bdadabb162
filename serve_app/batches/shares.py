"""Shares of the tenants in the rows that are at the engines."""

from collections import Counter
from collections.abc import Collection


class Shares:
    """Turns of the tenants, by weight.

    The tenant with the fewest rows at the engines by its weight is next. Among equals, it is the one with the
    fewest rows so far by its weight (start-time fair queueing), so that tenants take turns at a limit of one
    row too. A tenant that joins has no credit.

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
        """Return the place of a tenant among others: the least one is next.

        Args:
            tenant: The tenant.
            weight: Its share in relation to the others.
        """
        return self._rows[tenant] / weight, max(self._now, self._next.get(tenant, 0.0))

    def start(self, tenant: str, weight: float) -> None:
        """Note a row that is at the engines from now on."""
        self._now = self.turn(tenant, weight)[1]
        self._next[tenant] = self._now + 1 / weight
        self._rows[tenant] += 1
        self.total += 1

    def end(self, tenant: str) -> None:
        """Note a row that is there no longer."""
        self._rows[tenant] -= 1
        self.total -= 1

    def keep(self, tenants: Collection[str]) -> None:
        """Forget all other tenants that have no row there."""
        for tenant in self._next.keys() - tenants:
            if not self._rows[tenant]:
                del self._next[tenant], self._rows[tenant]
