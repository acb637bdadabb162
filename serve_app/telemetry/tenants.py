"""Which tenants have a series of their own: Prometheus can't bear one for everybody."""

OTHER = "other"

REMEMBERED = 1_000
"""Tenants of which the recent cost is known at most."""

HALF = 60
"""Rounds after which half of a tenant's cost is forgotten."""


class Tenants:
    """Names the tenants that use the most, as they come to do so.

    A series, once begun, stays until its process ends. So a name is given for good, to who is among the top
    `limit` by recent cost, and five times `limit` names are given at most.

    Args:
        limit: Tenants that are told apart.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: dict[str, float] = {}
        self._named: set[str] = set()

    def label(self, tenant: str) -> str:
        """Return the name that a tenant goes by."""
        return tenant if tenant in self._named else OTHER

    def round(self, costs: dict[str, int]) -> None:
        """Take in what each tenant was served since the last call, and name who belongs to the top now."""
        recent = self._recent
        fade = 0.5 ** (1 / HALF)
        for tenant in recent:
            recent[tenant] *= fade
        for tenant, cost in costs.items():
            recent[tenant] = recent.get(tenant, 0.0) + cost
        top = sorted(recent, key=recent.__getitem__, reverse=True)
        for tenant in top[REMEMBERED:]:
            del recent[tenant]
        for tenant in top[: self._limit]:
            if tenant not in self._named and len(self._named) < 5 * self._limit:
                self._named.add(tenant)
