"""Forecast of the batches that can't end within their windows."""

from collections.abc import Sequence

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
        batches: The open batches, the earliest first.
        rate: Rows per second; 0: it is not known.
        now: Seconds since the epoch.
    """
    if not rate:
        return {}
    running = [batch for batch in batches if batch.state == "in_progress"]
    rows: dict[str, int] = {}
    weights = {batch.tenant: batch.weight or 1.0 for batch in running}
    for batch in running:
        rows[batch.tenant] = rows.get(batch.tenant, 0) + remaining(batch)
    found = {}
    ahead: dict[str, int] = {}
    for batch in running:
        own = ahead[batch.tenant] = ahead.get(batch.tenant, 0) + remaining(batch)
        others = sum(
            min(own * weights[tenant] / weights[batch.tenant], count)
            for tenant, count in rows.items()
            if tenant != batch.tenant
        )
        needed_s = (own + others) / rate
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
