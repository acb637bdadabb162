"""Loads: kinds, numbers and lengths of prompts."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

FOX = "The quick brown fox jumps over the lazy dog, again and again and again. "

INPUT = OUTPUT = 64
"""Tokens of a prompt, and of its answer."""

CHUNK = 50
"""Prompts in one call of `/generate`."""

SERIES = 10_000
"""Most prompts in a series."""

Kind = Literal["chat", "burst", "completion", "lists", "mixed"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the length of its answer; the end of text is ignored, so that all servers do equal work.

    Attributes:
        text: The text; a character is a token, since the demo model's tokens are bytes.
        tokens: Tokens of the answer.
    """

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """One load.

    Attributes:
        about: Short description for the table.
        kind: "chat" streams, and so does "burst", which sends all that may be in flight at once and waits
            until the server is idle again; "completion" doesn't stream; "lists" and "mixed" are for
            `/generate` where a server has it, with lists of prompts or single ones.
        in_flight: Prompts in flight.
        count: Number of prompts.
        make: Returns the prompt of a number.
        lengths: Short description of the prompts' lengths.
        model: Name of the model.
    """

    about: str
    kind: Kind
    in_flight: int
    count: int
    make: Callable[[int], Prompt]
    lengths: str = "64 tokens in, 64 out"
    model: str = "demo"

    def prompts(self, share: float, series: int) -> Sequence[Prompt]:
        """Return a series of prompts. Repeated prompts could be in a server's prefix cache.

        Args:
            share: Share of `count`, 0 to 1; there are at least twice the prompts in flight.
            series: Number of the series, 0 to 99. Texts differ between series, lengths don't.
        """
        least = min(self.count, 2 * self.in_flight)
        first = series * SERIES
        return [self.make(number) for number in range(first, first + max(least, int(self.count * share)))]


def text(number: int, tokens: int) -> str:
    """Return a text that shares no prefix with that of another number."""
    return (f"{number:06}" + FOX * (tokens // len(FOX) + 1))[:tokens]


def fixed(number: int) -> Prompt:
    """Return a prompt of 64 tokens with an answer of 64."""
    return Prompt(text(number, INPUT), OUTPUT)


def short(number: int) -> Prompt:
    """Return a prompt of 64 tokens with an answer of 16."""
    return Prompt(text(number, INPUT), 16)


def shared(number: int) -> Prompt:
    """Return a prompt of 1,024 tokens, of which the first 896 (7 blocks of KV cache) are always the same."""
    return Prompt((FOX * 20)[:896] + text(number, 128), OUTPUT)


@cache
def mixed(number: int) -> Prompt:
    """Return a prompt of 8 to 128 tokens with an answer of 8 to 256, lognormal around a median of 48."""
    draw = random.Random(number % SERIES)
    answer = draw.lognormvariate(math.log(48), 0.9)
    return Prompt(text(number, draw.randint(8, 128)), min(256, max(8, round(answer))))


SHORT = "64 tokens in, 16 out"
PREFIX = "1,024 tokens in, of which 896 are shared by all, 64 out"
MIXED = "8 to 128 tokens in, 8 to 256 out (lognormal)"

LOADS: Mapping[str, Load] = {
    "stream-1": Load("streaming chat, 1 client", "chat", 1, 40, fixed),
    "stream-32": Load("streaming chat, 32 clients", "chat", 32, 640, fixed),
    "stream-128": Load("streaming chat, 128 clients", "chat", 128, 1024, fixed),
    "prefix-32": Load("streaming chat, 32 clients, a shared prefix", "chat", 32, 320, shared, PREFIX),
    "unary-32": Load("completions, 32 clients", "completion", 32, 640, fixed),
    "unary-128": Load("completions, 128 clients", "completion", 128, 1024, fixed),
    "generate": Load("lists of 50 prompts, 10 lists in flight", "lists", 10 * CHUNK, 1500, fixed),
    "generate-short": Load("lists of 50 prompts, 10 in flight", "lists", 10 * CHUNK, 3000, short, SHORT),
    "mixed": Load("single prompts, 64 in flight", "mixed", 64, 256, mixed, MIXED, "75m"),
}
"""By name."""


def document(number: int) -> Prompt:
    """Return a prompt of 256 tokens with an answer of 128."""
    return Prompt(text(number, 256), 128)


@cache
def mixed_list(number: int) -> Prompt:
    """Return a prompt of 64 tokens with an answer of 8 to 256, the same in each list of 50."""
    return Prompt(text(number, INPUT), mixed(number % SERIES // CHUNK).tokens)


@cache
def _book() -> str:
    return (FOX * 3_200)[: 220 * 1024 - 128]


def long(number: int) -> Prompt:
    """Return a prompt of 220 KB, all but the last 128 bytes always the same, with an answer of 16 tokens."""
    return Prompt(_book() + text(number, 128), 16)


DOCUMENT = "256 tokens in, 128 out"
LISTS = "64 tokens in, 8 to 256 out (lognormal, the same within a list)"
LONG = "220 KB in, of which the device has all but 128 bytes in its cache, 16 tokens out"

DEVICE_LOADS: Mapping[str, Load] = {
    **{
        f"device-{n}": Load(f"streaming chat, clients: {n}", "chat", n, count, document, DOCUMENT)
        for n, count in ((1, 12), (8, 48), (32, 192), (64, 256), (128, 512))
    },
    "device-burst": Load("bursts of 32 streaming chats", "burst", 32, 192, document, DOCUMENT),
    "device-lists": Load("lists of 50 prompts, 10 in flight", "lists", 10 * CHUNK, 1500, mixed_list, LISTS),
    "device-long": Load("streaming chat, 20 clients, long prompts", "chat", 20, 60, long, LONG),
}
"""Loads for a simulated device, by name. A step takes its time there, so the numbers are smaller."""

ALL_LOADS = {**LOADS, **DEVICE_LOADS}
