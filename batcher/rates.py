"""How fast records are served, and what follows: estimates of waits, and when to come back."""

import random
from collections.abc import Callable

from batcher.tenants import Tenant

MEMORY = 1 - 1 / 256
"""Weight that a finished record keeps when the next one finishes."""

ENOUGH = 16
"""Records to measure first."""

RETURNS_SHARE = 1 / 3
"""Share of a tenant's service that is set aside for records that come back; the rest is for new ones."""

SPREAD = 0.25
"""How far a time to come back is moved at random, as a share of it."""

MAX_TIERS = 64
"""Tiers of a tenant whose times to come back are remembered."""

LATEST_S = 60.0
"""Seconds after which a refused record may come back at the latest, unless its wait is longer."""


class ServiceRate:
    """The rate at which a window of records serves cost, from the time that finished ones spent in it.

    By Little's law a window that holds `inside` records of which each stays `mean` seconds lets
    inside / mean of them go per second. The same holds for cost, with the mean taken by cost.
    """

    def __init__(self) -> None:
        self._records = 0.0
        self._seconds = 0.0
        self._cost = 0.0
        self._cost_seconds = 0.0

    @property
    def known(self) -> bool:
        """True once enough has been measured to refuse a record for it."""
        return self._records > ENOUGH

    def learn(self, cost: int, seconds: float, records: int = 1) -> None:
        """Take in records of `cost` together that were inside for `seconds`."""
        self._records = self._records * MEMORY + records
        self._seconds = self._seconds * MEMORY + records * seconds
        self._cost = self._cost * MEMORY + cost
        self._cost_seconds = self._cost_seconds * MEMORY + cost * seconds

    def time_to_serve(self, records: int, cost: int, records_inside: int, cost_inside: int) -> float | None:
        """Return the seconds until so much has left the window; None: nothing has been measured yet."""
        if not self._records or not records_inside:
            return None
        wait = max(0, records) * self._seconds / self._records / records_inside
        if self._cost and cost_inside:
            wait = max(wait, max(0, cost) * self._cost_seconds / self._cost / cost_inside)
        return wait


def retry_after(
    tenant: Tenant,
    priority: int,
    wait_s: float,
    own: int,
    now: float,
    draw: Callable[[], float] = random.random,
) -> float:
    """Return the seconds after which a record that is refused now should come back.

    The records of one tenant come back one after the other, as fast as the tenant is served, and not
    before the wait is over, nor before those of the same or a higher tier; the demand of one tenant doesn't
    delay another. A random part spreads those of several tenants.

    Args:
        tenant: The tenant of the record.
        priority: Its tier.
        wait_s: Seconds that it would wait if it were let in.
        own: Records of its tenant that wait in its tier.
        now: The time.
        draw: Returns the random part, 0 to 1.
    """
    returns = tenant.returns
    if priority not in returns:
        if len(returns) > MAX_TIERS:
            returns.clear()
        returns[priority] = max((at for above, at in returns.items() if above < priority), default=now)
    at = min(max(now + wait_s, returns[priority]), now + max(wait_s, LATEST_S))
    returns[priority] = at
    for tier in returns:
        if tier >= priority:
            returns[tier] = max(returns[tier], now) + wait_s / (own + 1) / RETURNS_SHARE
    return (at - now) * (1 + SPREAD * draw())
