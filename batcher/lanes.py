"""Lanes: what records need beside cost, and of which there is little."""

from typing import Protocol


class Lanes(Protocol):
    """Owner of what records need beside cost, such as the places of adapters on a device.

    A `ContinuousBatcher` calls it when it decides, never from another thread; no call may wait. A need is a
    name, as given to `ContinuousBatcher.slot`. A record starts only with all its needs. If one is refused,
    the record is passed by: it keeps its place in the queue, and others behind it may start. A refused need
    is not asked for again until `give` or `unwanted` returns True, or `ContinuousBatcher.reopen` is called.
    """

    def take(self, need: str) -> bool:
        """Take the need for one record now; False: not now. A refused call is a wish for the need.

        A wish ends with the next `take` of the need that returns True, or with `unwanted`. A need is given
        back at once if another need of the same record is refused; the result of that `give` doesn't count.
        """
        ...

    def give(self, need: str) -> bool:
        """Give the need of one record back; return whether needs that were refused may succeed now."""
        ...

    def unwanted(self, need: str) -> bool:
        """End a wish: no record waits for the need any more. The result is as for `give`."""
        ...
