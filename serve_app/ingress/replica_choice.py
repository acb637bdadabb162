"""Choice of the replica for a request: by the prefixes that replicas hold, within a bound on their load."""

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from serve_app.api.facts import LEAST_MATCH
from serve_app.ingress.adapter_index import AdapterIndex
from serve_app.ingress.prefix_index import DEFAULT_CHUNKS, PrefixIndex
from serve_app.ingress.replica_loads import Charge, ReplicaLoads

TOKENS_PER_CHUNK = 128
"""Tokens in the 512 bytes of a chunk, at four bytes of text per token."""

SLACK_TOKENS = 16_384
"""Tokens by which a replica may be ahead of the least loaded one, over all callers."""

LEAST_SLACK_TOKENS = 1_024
"""Tokens by which it may be ahead by this caller's requests, however small a part of the traffic they are."""

SLACK_SHARE = 0.25
"""The same as a share of the least load; the largest of the three counts."""

CROWD = 4
"""Requests of all callers that may share a prefix on one replica while another has half of its load."""

AHEAD = 0.125
"""Share of the slack by which the first replica for a new prefix may be ahead of the second."""


@dataclass(slots=True, frozen=True)
class ReplicaState:
    """The report of a replica.

    Attributes:
        tokens: Tokens that ran or waited on it, for all callers, a few seconds ago.
        capacity: Tokens that its KV cache holds; None: not known.
        asleep: It waits for its turn on a device that it shares.
        adapters: Adapters that it has loaded.
        slots: Adapters that it can load at once; None: not known.
    """

    tokens: int = 0
    capacity: int | None = None
    asleep: bool = False
    adapters: tuple[str, ...] = ()
    slots: int | None = None


class ReplicaChoice:
    """Chooses the replica of each request.

    In this order:

    1. Replicas that the request is to avoid are left out, unless none is left; then those that sleep, unless
       none is left.
    2. Replicas on which this caller has more tokens than `limit` allows are left out.
    3. Of the rest, those that have the request's adapter loaded are taken. If there is none, the adapter's
       own hash draws the replica, as in 5, and the prompt doesn't count.
    4. Of the rest, those with the longest cached prefix of the prompt are taken, if it is at least a quarter
       of the prompt. Where many requests share a prefix, one with half the load takes it over, and holds it
       too from then on.
    5. Without one, the prompt's own hash draws two replicas, of which the first is taken unless it is ahead:
       other callers, which don't know what this one sent, send the same prefix there too.
    6. Where that leaves several, or none, chance draws two, and the less loaded one is chosen.

    Args:
        prefixes: Whether prefixes count; without, replicas are chosen by load alone.
        slack_tokens: Tokens that a load may be above the least one, over all callers.
        slack_share: The same as a share of the least load.
        draw: Random numbers.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        prefixes: bool = True,
        slack_tokens: int = SLACK_TOKENS,
        slack_share: float = SLACK_SHARE,
        draw: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loads = ReplicaLoads(clock)
        self._index = PrefixIndex()
        self._adapters = AdapterIndex()
        self._names: list[str] = []
        self._asleep: set[str] = set()
        self._prefixes = prefixes
        self._slack_tokens = slack_tokens
        self._slack_share = slack_share
        self._slack = float(slack_tokens)
        self._crowd = float(CROWD)
        self._draw = draw or random.Random()

    def update(self, replicas: Mapping[str, ReplicaState]) -> None:
        """Take over the replicas that there are, and what they report."""
        for name in self._names:
            if name not in replicas:
                self._forget(name)
        for name, state in replicas.items():
            if name not in self.loads.tokens:
                self.loads.add(name)
                chunks = DEFAULT_CHUNKS if state.capacity is None else state.capacity // TOKENS_PER_CHUNK
                self._index.add(name, chunks)
            self.loads.reported[name] = state.tokens
            self._adapters.update(name, state.adapters, state.slots)
        self._asleep = {name for name, state in replicas.items() if state.asleep}
        # All callers draw from the same order.
        self._names = sorted(replicas)
        share = self.loads.share()
        self._slack = max(LEAST_SLACK_TOKENS, self._slack_tokens * share)
        self._crowd = max(1.0, CROWD * share)

    def remove(self, replica: str) -> None:
        """Forget a replica that has died."""
        if replica in self.loads.tokens:
            self._forget(replica)
            self._names.remove(replica)

    def limit(self, least: float) -> float:
        """Return the most tokens that this caller may have on a replica to choose it.

        Args:
            least: The tokens that it has on the replica where it has the fewest.
        """
        return least + max(self._slack, self._slack_share * least)

    def choose(self, prefix: Sequence[int], avoid: Collection[str] = (), adapter: str = "") -> str:
        """Return the name of the replica for a request.

        Args:
            prefix: The hashes of its prompt; none: it is chosen by load alone.
            avoid: Replicas that have failed it.
            adapter: Its adapter; empty: none.

        Raises:
            LookupError: There is no replica.
        """
        loads: Mapping[str, int] = self.loads.tokens
        names: Sequence[str] = self._names
        if avoid and (left := [name for name in names if name not in avoid]):
            names, loads = left, {name: loads[name] for name in left}
        if self._asleep and (left := [name for name in names if name not in self._asleep]):
            names, loads = left, {name: loads[name] for name in left}
        if not names:
            raise LookupError("there is no replica")
        limit = self.limit(min(loads.values()))
        if adapter:
            holders = self._within(self._adapters.holders(adapter), loads, limit)
            if holders:
                names, loads = holders, {name: loads[name] for name in holders}
            elif agreed := self._agreed(names, (crc32(adapter.encode()),), loads, limit):
                return agreed
            else:
                # The prompt of an adapter that is loaded nowhere doesn't count.
                prefix = ()
        if self._prefixes and prefix:
            for chunk, holders in self._index.matches(prefix, LEAST_MATCH[len(prefix)]):
                if (chosen := self._lesser(holders, loads, limit)) is not None:
                    if self.loads.sharing(chosen, chunk) < self._crowd:
                        return chosen
                    return self._lesser(names, loads, loads[chosen] / 2) or chosen
            if (chosen := self._agreed(names, prefix, loads, limit)) is not None:
                return chosen
        chosen = self._lesser(names, loads, limit)
        assert chosen is not None, "the least loaded one is within the limit"
        return chosen

    def charge(
        self, call: str, replica: str, prefix: Sequence[int], tokens: int, adapter: str = ""
    ) -> Charge:
        """Note that a request goes to a replica: its load, and that it will hold the prompt.

        Args:
            call: An id of the call that carries it.
            replica: The replica.
            prefix: The hashes of the prompt.
            tokens: The request's tokens.
            adapter: Its adapter; empty: none.
        """
        if adapter:
            self._adapters.record(replica, adapter)
        chunk = None
        if self._prefixes:
            if known := self._index.known(prefix):
                chunk = prefix[known - 1]
            self._index.record(replica, prefix)
        return self.loads.charge(call, replica, tokens, chunk)

    def _forget(self, replica: str) -> None:
        self.loads.remove(replica)
        self._index.remove(replica)
        self._adapters.remove(replica)

    def _agreed(
        self, names: Sequence[str], prefix: Sequence[int], loads: Mapping[str, int], limit: float
    ) -> str | None:
        """Return the replica on which callers agree for a prefix that is new; None: it is too loaded."""
        if (count := len(names)) < 2:
            return None
        # The middle of the prompt: mostly behind what all prompts share, before what only this one has.
        number = prefix[len(prefix) // 2]
        first = names[number % count]
        second = names[(number + 1 + (number >> 16) % (count - 1)) % count]
        chosen = first if loads[first] <= loads[second] + AHEAD * self._slack else second
        return chosen if loads[chosen] <= limit else None

    def _lesser(self, names: Sequence[str], loads: Mapping[str, int], limit: float) -> str | None:
        """Return the less loaded of two replicas drawn from those within the limit; None: there is none."""
        if len(names) > 2:
            two = self._within(self._draw.sample(names, 2), loads, limit)
            # Few of many may be within it.
            names = two or self._within(names, loads, limit)
            if len(names) > 2:
                names = self._draw.sample(names, 2)
        else:
            names = self._within(names, loads, limit)
        if len(names) < 2:
            return names[0] if names else None
        first, second = names
        if loads[first] == loads[second]:
            # This caller has as much on both; the load of all callers may differ.
            reported = self.loads.reported
            if reported[first] == reported[second]:
                return self._draw.choice(names)
            return min(names, key=reported.__getitem__)
        return first if loads[first] < loads[second] else second

    @staticmethod
    def _within(names: Sequence[str], loads: Mapping[str, int], limit: float) -> list[str]:
        return [name for name in names if name in loads and loads[name] <= limit]
