"""Index of the prompt prefixes that each replica has in its KV cache, as far as the requests sent tell."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

MAX_CHUNKS = 262_144
"""Most hashes of all replicas together: about 64 MB."""

DEFAULT_CHUNKS = 1_024
"""Hashes per replica of which the KV capacity is not known: about 131,000 tokens."""

LEAST_CHUNKS = 64
"""Hashes that every replica may have, however many replicas there are."""


class PrefixIndex:
    """Replicas by the hashes of the prompts that they were sent, the least recently used forgotten first.

    A replica is forgotten, and so starts without prefixes, when it is removed.
    """

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._most: dict[str, int] = {}
        self._replicas: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def add(self, replica: str, chunks: int = DEFAULT_CHUNKS) -> None:
        """Add a replica that holds nothing yet.

        Args:
            replica: Its name.
            chunks: Most hashes to keep of it: as many as its KV cache has room for.
        """
        self._held[replica] = OrderedDict()
        self._most[replica] = chunks

    def remove(self, replica: str) -> None:
        """Forget a replica and what it held."""
        for chunk in self._held.pop(replica, ()):
            self._drop(chunk, replica)
        self._most.pop(replica, None)

    def record(self, replica: str, prefix: Sequence[int]) -> None:
        """Note that a replica was sent a prompt.

        Args:
            replica: Its name.
            prefix: The hashes of the prompt.
        """
        held = self._held[replica]
        # The end of a prompt goes before its beginning, which other prompts may share: vLLM evicts in the
        # same order.
        for chunk in reversed(prefix):
            if chunk in held:
                held.move_to_end(chunk)
            else:
                held[chunk] = None
                self._replicas.setdefault(chunk, []).append(replica)
        most = max(LEAST_CHUNKS, min(self._most[replica], MAX_CHUNKS // len(self._held)))
        while len(held) > most:
            self._drop(held.popitem(last=False)[0], replica)

    def known(self, prefix: Sequence[int]) -> int:
        """Return how many of the hashes of a prompt, from its beginning, any replica holds."""
        count = 0
        for chunk in prefix:
            if chunk not in self._replicas:
                break
            count += 1
        return count

    def matches(self, prefix: Sequence[int], least: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the replicas that hold a prefix, those with the longest match first, with its last hash.

        Each list has the replicas of the lists before it too.

        Args:
            prefix: The hashes of a prompt.
            least: Hashes that are too few for a match.
        """
        for depth in range(self.known(prefix) - 1, least - 1, -1):
            yield prefix[depth], self._replicas[prefix[depth]]

    def _drop(self, chunk: int, replica: str) -> None:
        replicas = self._replicas[chunk]
        replicas.remove(replica)
        if not replicas:
            del self._replicas[chunk]
