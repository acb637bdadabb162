"""The index of prefixes by replica."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.ingress import prefix_index
from serve_app.ingress.prefix_index import LEAST_CHUNKS, PrefixIndex


def matches(index: PrefixIndex, prefix: tuple[int, ...], least: int = 0) -> list[set[str]]:
    return [set(names) for _, names in index.matches(prefix, least)]


def test_the_longest_match_comes_first() -> None:
    index = PrefixIndex()
    for name in "abc":
        index.add(name)
    index.record("a", (1, 2))
    index.record("b", (1, 2, 3))
    index.record("c", (9,))
    assert matches(index, (1, 2, 3, 4)) == [{"b"}, {"a", "b"}, {"a", "b"}]
    assert matches(index, (1, 2, 3, 4), least=2) == [{"b"}]
    assert matches(index, (1, 2, 3, 4), least=3) == []
    assert matches(index, (8, 2, 3)) == []
    assert matches(index, ()) == []


def test_a_replica_that_is_removed_is_in_no_match_and_comes_back_with_nothing() -> None:
    index = PrefixIndex()
    for name in "ab":
        index.add(name)
        index.record(name, (1, 2))
    index.remove("a")
    index.remove("never there")
    assert matches(index, (1, 2)) == [{"b"}, {"b"}]
    index.add("a")
    assert matches(index, (1, 2)) == [{"b"}, {"b"}]
    assert len(index) == 2


def test_the_least_recently_used_is_forgotten_its_end_first() -> None:
    index = PrefixIndex()
    index.add("a", chunks=LEAST_CHUNKS)
    old = tuple(range(10))
    index.record("a", old)
    index.record("a", (0, 1, 2, *range(100, 100 + LEAST_CHUNKS - 8)))
    # Two were too many: those at the end of the old prompt.
    assert len(matches(index, old)) == 8
    index.record("a", tuple(range(1_000, 1_000 + LEAST_CHUNKS)))
    assert matches(index, old) == []


def test_all_replicas_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_CHUNKS", 4 * LEAST_CHUNKS)
    index = PrefixIndex()
    for name in "ab":
        index.add(name, chunks=1_000_000)
    for start in range(0, 100_000, 100):
        index.record("ab"[start // 100 % 2], tuple(range(start, start + 100)))
    assert len(index) == 4 * LEAST_CHUNKS


PREFIXES = st.lists(st.integers(0, 200), max_size=30, unique=True).map(tuple)
STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["record", "remove"]), PREFIXES), max_size=60
)


@settings(deadline=None, max_examples=40)
@given(STEPS, PREFIXES)
def test_it_stays_bounded_and_never_names_a_replica_that_is_gone(
    steps: list[tuple[str, str, tuple[int, ...]]], prefix: tuple[int, ...]
) -> None:
    index = PrefixIndex()
    there: set[str] = set()
    for name, act, chunks in steps:
        if act == "remove":
            index.remove(name)
            there.discard(name)
            continue
        if name not in there:
            index.add(name, chunks=LEAST_CHUNKS)
            there.add(name)
        index.record(name, chunks)
        assert len(index) <= len(there) * LEAST_CHUNKS
        assert name in (matches(index, chunks) or [{name}])[0]
    found = matches(index, prefix)
    assert all(names and names <= there for names in found)
