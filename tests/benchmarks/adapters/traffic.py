"""Which adapter each request is for, and when it is sent."""

import heapq
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

POPULARITY: Mapping[str, float] = {"uniform": 0.0, "Zipf": 1.0}
"""Exponents: the adapter of rank `n` is as popular as `n` to this power says, in reverse."""


def draw_adapters(adapters: Sequence[str], count: int, exponent: float, seed: int) -> list[str]:
    """Return the adapter of each of `count` requests.

    Args:
        adapters: Names of the adapters, the most popular first.
        count: Number of requests.
        exponent: Exponent of Zipf's law; 0: all are equally popular.
        seed: Seed of the draw.
    """
    weights = [rank**-exponent for rank in range(1, len(adapters) + 1)]
    return random.Random(seed).choices(adapters, weights, k=count)


class Arrival(NamedTuple):
    """A request that is to be sent.

    Attributes:
        at: Seconds since the beginning.
        adapter: Its adapter.
        tokens: Tokens of its answer.
        flood: It is one of the flood.
    """

    at: float
    adapter: str
    tokens: int
    flood: bool


class Traffic(NamedTuple):
    """Light traffic on all adapters but the last, and a flood on that one.

    Attributes:
        rate: Requests per second of each adapter with light traffic, Poisson.
        times: Requests of the flood for each request of another adapter; 0: there is no flood.
        tokens: Tokens of an answer; those of the flood are drawn between 1 and twice as many, so that they
            don't end in step.
        tenant: Tenant that all requests name; empty: none.
        warm_up_s: Seconds before the measurement.
        seconds: Seconds of the measurement.
    """

    rate: float
    times: float
    tokens: int
    tenant: str
    warm_up_s: float
    seconds: float

    @property
    def ends_s(self) -> float:
        """Seconds from the beginning to the end of the measurement."""
        return self.warm_up_s + self.seconds

    def arrivals(self, adapters: Sequence[str], seed: int) -> Iterator[Arrival]:
        """Yield requests without end, in order. The light ones of a seed are the same with any flood.

        Args:
            adapters: Names of the adapters; the flood is on the last one.
            seed: Seed of times and adapters.
        """
        *light, flooded = adapters
        streams = [self._light(light, random.Random(seed))]
        if self.times:
            streams.append(self._flood(flooded, random.Random(seed + 1_000_003)))
        return heapq.merge(*streams)

    def _light(self, adapters: Sequence[str], draw: random.Random) -> Iterator[Arrival]:
        at = 0.0
        while True:
            at += draw.expovariate(self.rate * len(adapters))
            yield Arrival(at, draw.choice(adapters), self.tokens, False)

    def _flood(self, adapter: str, draw: random.Random) -> Iterator[Arrival]:
        at = 0.0
        while True:
            at += draw.expovariate(self.rate * self.times)
            yield Arrival(at, adapter, draw.randint(1, 2 * self.tokens), True)
