"""Labels of tenants: only the largest have their own series; Prometheus can't hold a series for each."""

OTHER = "other"

REMEMBERED = 1_000
"""Maximum tenants whose recent cost is remembered."""

HALF = 60
"""Rounds after which a cost counts half."""


class TenantLabels:
    """Gives separate labels to the tenants with the highest recent cost.

    A series lasts until its process ends. So each tenant among the top `limit` keeps its label, and at most
    five times `limit` tenants get a label.

    Args:
        limit: Size of the top.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: dict[str, float] = {}
        self._named: set[str] = set()

    def label(self, tenant: str) -> str:
        """Return the label of a tenant."""
        return tenant if tenant in self._named else OTHER

    def round(self, costs: dict[str, int]) -> None:
        """Add the costs served since the last call, by tenant, and label the tenants now in the top."""
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
