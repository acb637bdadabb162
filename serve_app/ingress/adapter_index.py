"""Index of the adapters that each replica has loaded, as far as its reports and the requests sent tell."""

from collections import OrderedDict
from collections.abc import Collection

DEFAULT_SLOTS = 8
"""Adapters that a replica holds whose slots are not known."""


class AdapterIndex:
    """Replicas by the adapters that they hold.

    A report is seconds old; the adapters that this caller has asked for since then count too, the least
    recently used forgotten first.
    """

    def __init__(self) -> None:
        self._reported: dict[str, frozenset[str]] = {}
        self._sent: dict[str, OrderedDict[str, None]] = {}
        self._slots: dict[str, int] = {}

    def update(self, replica: str, adapters: Collection[str], slots: int | None) -> None:
        """Take over a report.

        Args:
            replica: Its name.
            adapters: The adapters that it has loaded.
            slots: How many it can load; None: it isn't known.
        """
        self._reported[replica] = frozenset(adapters)
        self._slots[replica] = slots or DEFAULT_SLOTS
        self._sent.setdefault(replica, OrderedDict())

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        for known in (self._reported, self._sent, self._slots):
            known.pop(replica, None)

    def record(self, replica: str, adapter: str) -> None:
        """Note that a replica was sent a request for an adapter."""
        if (sent := self._sent.get(replica)) is None:
            return
        sent[adapter] = None
        sent.move_to_end(adapter)
        while len(sent) > self._slots[replica]:
            sent.popitem(last=False)

    def holders(self, adapter: str) -> list[str]:
        """Return the replicas that have an adapter loaded."""
        return [
            name for name, sent in self._sent.items() if adapter in sent or adapter in self._reported[name]
        ]
