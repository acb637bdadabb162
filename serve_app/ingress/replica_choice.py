"""Choice of the replica for a request: by the prefixes that replicas hold, within a bound on their load."""

import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from zlib import crc32

from serve_app.api.facts import LEAST_MATCH

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
"""Share of the slack by which the first replica for a new prefix may be ahead of the second.

Always the first, a simulated fleet of 8 replicas with 256 prefixes makes 6% fewer tokens/s, with one Ingress
or several; always the lesser, 4 replicas behind 4 Ingresses make 4% fewer.
"""

MAX_CHUNKS = 262_144
"""Maximum hashes of all replicas together: about 64 MB."""

DEFAULT_CHUNKS = 1_024
"""Hashes per replica of which the KV capacity is not known: about 131,000 tokens."""

LEAST_CHUNKS = 64
"""Hashes that every replica may have, however many replicas there are."""

DEFAULT_SLOTS = 8
"""Adapters that a replica holds whose slots are not known."""


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


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """The load of one replica.

    This caller's tokens and the reported tokens are not added: a report is seconds old, and callers that
    follow it all send to the replica that was the least loaded then.

    Attributes:
        tokens: Tokens of this caller's calls on the replica.
        reported: Its tokens of all callers, a few seconds ago.
        sharing: Calls of this caller by the last hash that the prompt shares with earlier prompts.
    """

    tokens: int = 0
    reported: int = 0
    sharing: Counter[int] = field(default_factory=Counter)


class ReplicaCharge:
    """The tokens of one try of a request on a replica, from the choice of the replica to the end of the try.

    The caller makes and releases a charge; the router puts it on a replica. The two may run in different
    threads, and a try may end before a replica is chosen for it.

    Args:
        met: Replicas that earlier tries of the request were sent to.

    Attributes:
        met: Replicas that the request was sent to; another replica is chosen next, while there is one.
    """

    _lock = Lock()
    """Guards the loads of all replicas."""

    def __init__(self, met: Collection[str] = ()) -> None:
        self.met = set(met)
        self._load: ReplicaLoad | None = None
        self._tokens = 0
        self._chunk: int | None = None
        self._ended = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None for another process."""
        return type(None), ()

    def put(self, load: ReplicaLoad, tokens: int, chunk: int | None) -> None:
        """Charge a replica, and no more an earlier one; a try that has ended charges none.

        Args:
            load: The load of the replica.
            tokens: The tokens of the request.
            chunk: The last hash of its prompt that earlier prompts have too; None: there is none.
        """
        with self._lock:
            self._take_off()
            if not self._ended:
                self._load, self._tokens, self._chunk = load, tokens, chunk
                load.tokens += tokens
                if chunk is not None:
                    load.sharing[chunk] += 1

    def move(self, load: ReplicaLoad) -> None:
        """Charge another replica with the same tokens."""
        self.put(load, self._tokens, self._chunk)

    def release(self) -> None:
        """End the charge; a second time does nothing."""
        with self._lock:
            self._ended = True
            self._take_off()

    def _take_off(self) -> None:
        if (load := self._load) is None:
            return
        self._load = None
        load.tokens -= self._tokens
        if self._chunk is not None:
            load.sharing[self._chunk] -= 1
            if not load.sharing[self._chunk]:
                del load.sharing[self._chunk]


class PrefixIndex:
    """Replicas by the hashes of the prompts that they were sent, the least recently used forgotten first.

    A replica is forgotten, and so starts without prefixes, when it is removed.

    Args:
        most: Maximum hashes of all replicas together.
    """

    def __init__(self, most: int = MAX_CHUNKS) -> None:
        self._most_of_all = most
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._most: dict[str, int] = {}
        self._replicas: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def add(self, replica: str, chunks: int = DEFAULT_CHUNKS) -> None:
        """Add a replica that holds nothing yet.

        Args:
            replica: Its name.
            chunks: Maximum hashes to keep of it: as many as its KV cache has room for.
        """
        self._held[replica] = OrderedDict()
        self._most[replica] = chunks

    def remove(self, replica: str) -> None:
        """Forget a replica and its prefixes."""
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
        most = max(LEAST_CHUNKS, min(self._most[replica], self._most_of_all // len(self._held)))
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
        """Yield the replicas that hold a prefix, the longest match first, with its last hash.

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


class ReplicaChoice:
    """Chooses the replica of each request.

    In this order:

    1. Replicas that the request is to avoid are left out, unless none is left; then sleeping replicas, unless
       none is left.
    2. Replicas on which this caller has more tokens than `limit` allows are left out.
    3. Of the rest, the replicas with the request's adapter are taken. If there is none, the adapter's
       own hash draws the replica, as in 5, and the prompt doesn't count.
    4. Of the rest, the replicas with the longest cached prefix of the prompt are taken, if it is at least a
       quarter of the prompt. Where many requests share a prefix, a replica with half the load takes it over,
       and holds it too from then on.
    5. Without such a prefix, the prompt's own hash draws two replicas, of which the first is taken unless it
       is ahead: other callers, which don't know this caller's requests, send the same prefix there too.
    6. Where that leaves several replicas, or none, chance draws two, and the less loaded replica is chosen.

    Args:
        prefixes: Whether prefixes count; without, replicas are chosen by load alone.
        slack_tokens: Tokens that a load may be above the least one, over all callers.
        slack_share: The same as a share of the least load.
        draw: Random numbers.

    Attributes:
        loads: The load of each replica.
    """

    def __init__(
        self,
        *,
        prefixes: bool = True,
        slack_tokens: int = SLACK_TOKENS,
        slack_share: float = SLACK_SHARE,
        draw: random.Random | None = None,
    ) -> None:
        self.loads: dict[str, ReplicaLoad] = {}
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
        """Take over the present replicas, and their reports."""
        for name in self._names:
            if name not in replicas:
                self._forget(name)
        for name, state in replicas.items():
            if name not in self.loads:
                self.loads[name] = ReplicaLoad()
                chunks = DEFAULT_CHUNKS if state.capacity is None else state.capacity // TOKENS_PER_CHUNK
                self._index.add(name, chunks)
            self.loads[name].reported = state.tokens
            self._adapters.update(name, state.adapters, state.slots)
        self._asleep = {name for name, state in replicas.items() if state.asleep}
        # All callers draw from the same order.
        self._names = sorted(replicas)
        # This caller's part of the load, from 0 to 1. Reports may be older than its calls.
        reported = sum(load.reported for load in self.loads.values())
        own = sum(load.tokens for load in self.loads.values())
        share = own / reported if own < reported else 1.0
        self._slack = max(LEAST_SLACK_TOKENS, self._slack_tokens * share)
        self._crowd = max(1.0, CROWD * share)

    def remove(self, replica: str) -> None:
        """Forget a replica that has died."""
        if replica in self.loads:
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
        names = self._awake([name for name in self._names if name not in avoid] or self._names)
        if not names:
            raise LookupError("there is no replica")
        loads = {name: self.loads[name].tokens for name in names}
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
                    if self.loads[chosen].sharing[chunk] < self._crowd:
                        return chosen
                    return self._lesser(names, loads, loads[chosen] / 2) or chosen
            if (chosen := self._agreed(names, prefix, loads, limit)) is not None:
                return chosen
        chosen = self._lesser(names, loads, limit)
        assert chosen is not None, "the least loaded one is within the limit"
        return chosen

    def two(self) -> list[str]:
        """Return two replicas that chance draws, or all where there are no more."""
        names = self._awake(self._names)
        return self._draw.sample(names, min(2, len(names)))

    def send(
        self, charge: ReplicaCharge, replica: str, prefix: Sequence[int], tokens: int, adapter: str = ""
    ) -> None:
        """Note that a request goes to a replica: its load, and that it will hold the prompt.

        Args:
            charge: The charge of the request.
            replica: The replica.
            prefix: The hashes of the prompt.
            tokens: The request's tokens.
            adapter: Its adapter; empty: none.
        """
        if len(charge.met) + 1 >= len(self.loads):
            # The request has met all: it may meet them again.
            charge.met.clear()
        charge.met.add(replica)
        if adapter:
            self._adapters.record(replica, adapter)
        chunk = None
        if self._prefixes:
            if known := self._index.known(prefix):
                chunk = prefix[known - 1]
            self._index.record(replica, prefix)
        charge.put(self.loads[replica], tokens, chunk)

    def move(self, charge: ReplicaCharge, replica: str) -> None:
        """Note that a request has gone to this replica, perhaps instead of the chosen one."""
        if (load := self.loads.get(replica)) is not None:
            charge.met.add(replica)
            charge.move(load)

    def _forget(self, replica: str) -> None:
        del self.loads[replica]
        self._index.remove(replica)
        self._adapters.remove(replica)

    def _awake(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self._asleep] or names

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
        """Return the less loaded of two replicas drawn within the limit; None: there is none."""
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
            reported = {name: self.loads[name].reported for name in names}
            if reported[first] == reported[second]:
                return self._draw.choice(names)
            return min(names, key=reported.__getitem__)
        return first if loads[first] < loads[second] else second

    @staticmethod
    def _within(names: Sequence[str], loads: Mapping[str, int], limit: float) -> list[str]:
        return [name for name in names if name in loads and loads[name] <= limit]
