"""Choice of the replica for a request: by the prefixes that replicas hold, within a bound on their load."""

import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Share of the slack by which the first replica for a new prefix may be ahead of the second."""

UNTAKEN_S = 60.0
"""Seconds after which a call that no replica has taken is given up: its caller may have left in between."""

MAX_CHUNKS = 262_144
"""Most hashes of all replicas together: about 64 MB."""

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
class Charge:
    """The tokens of one call on one replica.

    Attributes:
        call: The id of the call; calls of one HTTP request share it.
        replica: The replica.
        tokens: The tokens.
        at: When the replica was chosen.
        chunk: The last hash of its prompt that was known already; None: there was none.
        taken: The replica has taken the call, or the call has ended.
    """

    call: str
    replica: str
    tokens: int
    at: float
    chunk: int | None = None
    taken: bool = False


class ReplicaLoads:
    """Tokens of this caller's calls on each replica, and what the replicas report of all callers.

    The two are not added: a report is seconds old, and callers that follow it all send to the replica that
    was the least loaded then. The reports tell how much of the traffic is this caller's.

    Attributes:
        tokens: This caller's tokens on each replica.
        reported: Each replica's tokens of all callers, a few seconds ago.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens: dict[str, int] = {}
        self.reported: dict[str, int] = {}
        self._total = 0
        self._sharing: Counter[tuple[str, int | None]] = Counter()
        self._charges: dict[str, list[Charge]] = {}
        self._untaken: deque[Charge] = deque()
        self._clock = clock

    def add(self, replica: str) -> None:
        """Add a replica without load."""
        self.tokens[replica] = self.reported[replica] = 0

    def remove(self, replica: str) -> None:
        """Forget a replica and what was charged to it."""
        for charge in [one for charges in self._charges.values() for one in charges]:
            if charge.replica == replica:
                self.release(charge)
        del self.tokens[replica], self.reported[replica]

    def share(self) -> float:
        """Return how much of the load of all replicas is this caller's, from 0 to 1."""
        reported = sum(self.reported.values())
        return self._total / reported if self._total < reported else 1.0

    def sharing(self, replica: str, chunk: int) -> int:
        """Return how many calls on a replica share a prefix, and nothing longer, with others."""
        return self._sharing[replica, chunk]

    def charge(self, call: str, replica: str, tokens: int, chunk: int | None = None) -> Charge:
        """Add a call to the replica that is chosen for it."""
        now = self._clock()
        while self._untaken and (self._untaken[0].taken or now - self._untaken[0].at > UNTAKEN_S):
            lost = self._untaken.popleft()
            if not lost.taken:
                self.release(lost)
        charge = Charge(call, replica, tokens, now, chunk)
        self._charges.setdefault(call, []).append(charge)
        self._untaken.append(charge)
        self._change(charge, 1)
        return charge

    def move(self, charge: Charge, replica: str) -> None:
        """Put a call on the replica that it was sent to, if that isn't the one that was chosen."""
        if charge.replica != replica and charge in self._charges.get(charge.call, ()):
            self._change(charge, -1)
            charge.replica = replica
            self._change(charge, 1)

    def take(self, call: str, replica: str) -> None:
        """Note that a replica has taken a call: its end will be told.

        Of several with one id it has taken one: the end of another, whose caller has left before, is never
        told.
        """
        for charge in self._charges.get(call, ()):
            if charge.replica == replica and not charge.taken:
                charge.taken = True
                return

    def end(self, call: str, replica: str) -> None:
        """Take a call that has ended off its replica. One that was never charged is ignored."""
        for charge in self._charges.get(call, ()):
            if charge.replica == replica:
                self.release(charge)
                return

    def release(self, charge: Charge) -> None:
        """Take a call off its replica; a second time does nothing."""
        charges = self._charges.get(charge.call, [])
        if charge not in charges:
            return
        charges.remove(charge)
        if not charges:
            del self._charges[charge.call]
        charge.taken = True
        self._change(charge, -1)

    def _change(self, charge: Charge, calls: int) -> None:
        if charge.replica not in self.tokens:
            return
        self.tokens[charge.replica] += calls * charge.tokens
        self._total += calls * charge.tokens
        if charge.chunk is not None:
            place = charge.replica, charge.chunk
            self._sharing[place] += calls
            if not self._sharing[place]:
                del self._sharing[place]


class PrefixIndex:
    """Replicas by the hashes of the prompts that they were sent, the least recently used forgotten first.

    A replica is forgotten, and so starts without prefixes, when it is removed.

    Args:
        most: Most hashes of all replicas together.
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
