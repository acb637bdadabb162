"""Slots of adapters in an engine: those that are loaded, and the requests that wait for another one."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class AdapterSlots:
    """Bounds the adapters that have requests in vLLM, and tells which are resident.

    vLLM's scheduler counts the adapters of a step, and not the pinned ones that are idle. With more of both
    than slots, vLLM would evict an adapter of the same step and fail. It also serves adapters that are
    loaded before all others, for as long as requests for them come.

    So a request for an adapter that isn't resident waits, in order, for a slot. While it waits, the adapter
    that was used least recently is drained: new requests for it wait behind.

    Args:
        count: The slots.

    Attributes:
        count: The slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # The requests of each; the least recently used one goes first.
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._pinned: set[str] = set()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._draining: str | None = None
        self._left: dict[str, asyncio.Event] = {}

    @property
    def resident(self) -> list[str]:
        """The adapters that are loaded."""
        return list(self._resident)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def pin(self, adapter: str) -> None:
        """Load an adapter that keeps its slot."""
        self._pinned.add(adapter)
        self._resident.setdefault(adapter, 0)

    def remove(self, adapter: str) -> None:
        """Forget an adapter without requests."""
        self._pinned.discard(adapter)
        self._resident.pop(adapter, None)
        self._admit()

    async def left(self, adapter: str) -> None:
        """Wait until an adapter has no requests."""
        while self._resident.get(adapter):
            event = self._left.setdefault(adapter, asyncio.Event())
            await event.wait()

    @asynccontextmanager
    async def using(self, adapter: str) -> AsyncIterator[None]:
        """Hold an adapter in its slot; wait for one."""
        if not self._enter(adapter):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((adapter, place))
            self._admit()
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._leave(adapter)
                else:
                    # `_admit` may have passed it already.
                    with suppress(ValueError):
                        self._waiting.remove((adapter, place))
                    self._admit()
                raise
        try:
            yield
        finally:
            self._leave(adapter)

    def _enter(self, adapter: str) -> bool:
        """Take a place in a slot, if there is one now."""
        if adapter in self._resident:
            if adapter == self._draining:
                return False
        elif self._waiting or not self._make_room():
            return False
        self._take(adapter)
        return True

    def _take(self, adapter: str) -> None:
        self._resident[adapter] = self._resident.get(adapter, 0) + 1
        self._resident.move_to_end(adapter)

    def _make_room(self) -> bool:
        """Return whether there is a free slot; an adapter without requests gives its own."""
        if len(self._resident) < self.count:
            return True
        others = [adapter for adapter in self._resident if adapter not in self._pinned]
        for adapter in others:
            if not self._resident[adapter]:
                del self._resident[adapter]
                return True
        return False

    def _leave(self, adapter: str) -> None:
        self._resident[adapter] -= 1
        if not self._resident[adapter] and (event := self._left.pop(adapter, None)):
            event.set()
        self._admit()

    def _admit(self) -> None:
        """Let those in that wait, in their order, and choose the adapter to drain for the first one left."""
        while self._waiting:
            adapter, place = self._waiting[0]
            if place.done():
                self._waiting.popleft()
                continue
            # One that is resident waited behind another, which has left.
            if adapter not in self._resident and not self._make_room():
                break
            self._waiting.popleft()
            self._take(adapter)
            self._draining = None
            place.set_result(None)
        if not self._waiting:
            self._draining = None
        elif self._draining not in self._resident:
            others = (adapter for adapter in self._resident if adapter not in self._pinned)
            self._draining = next(others, None)
