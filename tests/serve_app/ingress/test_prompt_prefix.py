"""Hashes of the beginnings of prompts."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.ingress.prompt_prefix import CHUNK_BYTES, ENDS, LEAST_MATCH, LEVELS, MAX_BYTES, prefix_hashes
from tests.progress import run


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many hashes two prompts begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(st.binary(max_size=3_000), st.binary(max_size=3_000), st.binary(max_size=3_000))
def test_prompts_have_the_hashes_of_their_common_beginning_in_common(
    shared: bytes, a: bytes, b: bytes
) -> None:
    alike = common(prefix_hashes(shared + a), prefix_hashes(shared + b))
    assert alike >= sum(end <= len(shared) for end in ENDS)


def test_prompts_that_differ_have_no_hash_in_common_behind_the_difference() -> None:
    text = bytes(range(256)) * 32
    for at in (0, 511, 512, 5_000):
        other = bytearray(text)
        other[at] ^= 1
        one, two = prefix_hashes(text), prefix_hashes(bytes(other))
        assert common(one, two) == at // CHUNK_BYTES
        assert not set(one[at // CHUNK_BYTES :]) & set(two)


def test_a_prompt_shorter_than_a_chunk_has_none() -> None:
    assert prefix_hashes(b"x" * (CHUNK_BYTES - 1)) == ()
    assert len(prefix_hashes(b"x" * CHUNK_BYTES)) == 1


@pytest.mark.parametrize("size", [1_000, 8_192, 20_000, 220_000, MAX_BYTES, 10 * MAX_BYTES])
def test_the_hashes_of_a_long_prompt_are_bounded_and_reach_its_end(size: int) -> None:
    hashes = prefix_hashes(b"x" * size)
    assert len(hashes) <= LEVELS
    reached = ENDS[len(hashes) - 1]
    assert reached >= min(MAX_BYTES, size - max(CHUNK_BYTES, size // 8))


def test_a_quarter_of_a_prompt_is_the_least_match() -> None:
    # 16 chunks of 512 bytes: the first three end before a quarter.
    assert LEAST_MATCH[16] == 3
    for hashes in range(1, LEVELS + 1):
        assert 4 * ENDS[LEAST_MATCH[hashes]] >= ENDS[hashes - 1]


def test_other_processes_compute_the_same_hashes() -> None:
    """Several Ingresses that know nothing of each other draw the same replicas for a prompt."""
    script = "from serve_app.ingress.prompt_prefix import prefix_hashes; print(prefix_hashes(b'abc' * 1000))"
    done = run([sys.executable, "-c", script])
    assert done.stdout == f"{prefix_hashes(b'abc' * 1000)}\n", done.stderr
