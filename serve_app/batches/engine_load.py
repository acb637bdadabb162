"""Load of the engines, from the statistics of their replicas."""

from collections.abc import Iterable
from typing import NamedTuple

from serve_app.api.protocol import JSON


class EngineLoad(NamedTuple):
    """Records in the batchers of engines.

    Attributes:
        running: Records that run.
        waiting: Records that wait.
        free: Records beyond these that would run at once; None: it isn't known.
    """

    running: int
    waiting: int
    free: int | None = None


def engine_load(replicas: Iterable[JSON]) -> EngineLoad:
    """Return the load of replicas together.

    Args:
        replicas: Their entries in `/stats`.
    """
    batchers = [replica["batcher"] for replica in replicas]
    free = [_free(batcher) for batcher in batchers]
    known = [number for number in free if number is not None]
    return EngineLoad(
        sum(batcher.get("running", 0) for batcher in batchers),
        sum(batcher.get("queue_depth", 0) for batcher in batchers),
        sum(known) if len(known) == len(free) else None,
    )


def _free(batcher: JSON) -> int | None:
    """Return the records that one replica would start at once, if they are like those that run there."""
    places = batcher.get("max_running")
    if places is None:
        return None
    running: int = batcher["running"]
    free: int = places - running
    if tokens := batcher["running_cost"]:
        # Records reserve tokens too: as many as those that run have on average.
        free = min(free, (batcher["capacity"] - tokens) * running // tokens)
    waiting: int = batcher["queue_depth"]
    return max(0, free - waiting)
