"""Hashes of the beginning of a prompt, by which requests that share one are recognised."""

from collections.abc import Iterator
from itertools import islice
from zlib import crc32

CHUNK_BYTES = 512
"""Bytes that one hash covers: about 128 tokens of text."""

LEVELS = 96
"""Most hashes of a prompt; the last one ends at half a megabyte."""


def _ends() -> Iterator[int]:
    """Yield where each hashed chunk ends: every 512 bytes up to 8 KiB, then at distances that double."""
    end, step = 0, CHUNK_BYTES
    while True:
        for _ in range(16):
            end += step
            yield end
        step *= 2


ENDS = tuple(islice(_ends(), LEVELS))
"""Bytes after which each hash is taken. A prompt of 220 kB has 80 hashes, each a 16th or less of its length
behind the one before."""

MAX_BYTES = ENDS[-1]


def prefix_hashes(text: bytes) -> tuple[int, ...]:
    """Return a hash for each beginning of a text that ends at one of `ENDS`.

    Two texts with the same beginning have the same first hashes, in every process. Each hash covers the one
    before and the `CHUNK_BYTES` in front of its end, so a long text is sampled, and costs no more than 48 KiB
    do. A text made to collide with another only goes to that one's replica.
    """
    length = len(text)
    found = []
    last = 0
    for end in ENDS:
        if end > length:
            break
        last = crc32(text[end - CHUNK_BYTES : end], last)
        found.append(last)
    return tuple(found)


def salted(prefix: tuple[int, ...], adapter: str) -> tuple[int, ...]:
    """Return the hashes of a prompt for an adapter, which shares no KV cache with others."""
    salt = crc32(adapter.encode())
    return tuple(number ^ salt for number in prefix)


def _depths() -> Iterator[int]:
    for length in (0, *ENDS):
        yield sum(4 * end < length for end in ENDS)


LEAST_MATCH = tuple(_depths())
"""By the count of a prompt's hashes: hashes that cover less than a quarter of it.

A match of no more than these saves too little to choose a replica by: a template that all prompts share would
send each new prompt to the replica that has seen the first.
"""
