"""Forecast of the batches that can't end within their windows."""

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from serve_app.batches.stored import Batch

MARGIN = 1.1
"""A batch is late if it takes so much more than its window allows: the rate is a measurement."""


def remaining(batch: Batch) -> int:
    """Return the rows of a batch that have no result yet; 0 until it is validated."""
    return batch.total - batch.completed - batch.failed


def late(batches: Sequence[Batch], rate: float, now: float) -> dict[str, str]:
    """Return a message for each batch that won't end within its window at this rate, by id.

    A tenant's batches go one after the other, and tenants have shares by weight; so a batch waits for the
    earlier ones of its tenant, and meanwhile for rows of each other tenant as their shares are, as far as it
    has so many.

    Args:
        batches: The open batches of a model, the earliest first.
        rate: Its rows per second; 0: it is not known.
        now: Seconds since the epoch.
    """
    if not rate:
        return {}
    running = [batch for batch in batches if batch.state == "in_progress"]
    rows: Counter[str] = Counter()
    weights = {batch.tenant: batch.weight or 1.0 for batch in running}
    for batch in running:
        rows[batch.tenant] += remaining(batch)
    # The rounds of each tenant: in one round, a tenant has as many rows as its weight is. The sums over all
    # tenants that end within some rounds, and over the others, make each batch a look into a sorted list.
    rounds = sorted((count / weights[tenant], count, weights[tenant]) for tenant, count in rows.items())
    ended = [0, *accumulate(count for _, count, _ in rounds)]
    going = [0.0, *accumulate(weight for _, _, weight in reversed(rounds))]
    found = {}
    ahead: Counter[str] = Counter()
    for batch in running:
        ahead[batch.tenant] += remaining(batch)
        own = ahead[batch.tenant]
        needed = own / weights[batch.tenant]
        place = bisect(rounds, needed, key=lambda one: one[0])
        together = ended[place] + needed * going[len(rounds) - place]
        needed_s = together / rate
        left_s = max(0.0, batch.expires_at - now)
        if needed_s > left_s * MARGIN:
            unrun = round(remaining(batch) * (1 - left_s / needed_s))
            found[batch.id] = (
                f"At the measured rate of {rate:.3g} rows/s, this batch ends {_time(needed_s - left_s)} "
                f"after its completion_window: about {unrun:,} of its {batch.total:,} rows would not be run, "
                "and be in the error file as batch_expired"
            )
    return found


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(1, round(seconds / 60))} min"
