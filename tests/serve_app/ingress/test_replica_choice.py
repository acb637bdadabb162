"""The policy that chooses a replica."""

import pickle
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.facts import prefix_hashes
from serve_app.ingress.replica_choice import (
    AdapterIndex,
    PrefixIndex,
    ReplicaCharge,
    ReplicaChoice,
    ReplicaState,
)
from serve_app.wire.request import RelayRequest

SLACK_TOKENS = 16_384
"""Tokens by which a replica may be ahead of the others where a prefix is cached."""

LEAST_CHUNKS = 64
"""Hashes that are remembered of the smallest replica."""

PREFIX = prefix_hashes(b"a prompt that others share " * 100)


def choice(names: str = "abc", seed: int = 1, **options: float) -> ReplicaChoice:
    made = ReplicaChoice(draw=random.Random(seed), **options)  # type: ignore[arg-type]
    made.update({name: ReplicaState() for name in names})
    return made


def some_prefixes(count: int) -> list[tuple[int, ...]]:
    """Return prefixes of which no two begin alike."""
    return [prefix_hashes(f"{number} ".encode() * 500) for number in range(count)]


def send(policy: ReplicaChoice, prefix: tuple[int, ...] = (), tokens: int = 1_000) -> str:
    name = policy.choose(prefix)
    policy.send(ReplicaCharge(), name, prefix, tokens)
    return name


def test_the_replica_with_the_longest_prefix_is_chosen() -> None:
    policy = choice()
    policy.send(ReplicaCharge(), "b", PREFIX[:3], 0)
    policy.send(ReplicaCharge(), "c", PREFIX, 0)
    assert {policy.choose(PREFIX) for _ in range(20)} == {"c"}
    assert {policy.choose(PREFIX[:3]) for _ in range(20)} == {"b", "c"}


def test_a_replica_that_is_too_loaded_is_not() -> None:
    policy = choice()
    policy.send(ReplicaCharge(), "b", PREFIX, SLACK_TOKENS)
    assert policy.choose(PREFIX) == "b"
    policy.send(ReplicaCharge(), "b", (), 1)
    assert policy.choose(PREFIX) in "ac"
    # The next longest is taken then.
    policy.send(ReplicaCharge(), "a", PREFIX[:3], 10)
    assert policy.choose(PREFIX) == "a"


def test_the_bound_grows_with_the_load() -> None:
    policy = choice("ab")
    policy.send(ReplicaCharge(), "a", PREFIX, 499_000)
    policy.send(ReplicaCharge(), "b", (), 400_000)
    assert policy.choose(PREFIX) == "a"
    policy.send(ReplicaCharge(), "a", (), 2_000)
    assert policy.choose(PREFIX) == "b"


def test_a_short_match_is_none() -> None:
    """A template that all prompts share would send all of them to one replica."""
    policy = choice()
    policy.send(ReplicaCharge(), "a", PREFIX[:1], SLACK_TOKENS)
    assert policy.choose((PREFIX[0], 7, 8, 9)) == "a"
    assert {policy.choose((PREFIX[0], 7, n, 9, 9)) for n in range(50)} == {"b", "c"}


def test_a_prefix_that_many_requests_share_is_taken_over_by_an_idle_replica() -> None:
    policy = choice("abc")
    chosen = [send(policy, PREFIX) for _ in range(30)]
    assert len(set(chosen[:4])) == 1
    assert max(Counter(chosen).values()) <= 15
    # It stays as long as the others are half as loaded or more.
    policy = choice("ab")
    policy.send(ReplicaCharge(), "a", PREFIX, 1_000)
    policy.send(ReplicaCharge(), "b", (), 6_000)
    assert {send(policy, PREFIX) for _ in range(10)} == {"a"}


def test_requests_that_share_more_than_a_frequent_prefix_are_no_crowd() -> None:
    """The turns of one chat go where the chat is, however many chats share its system prompt."""
    policy = choice("ab")
    chat = prefix_hashes(b"a prompt that others share " * 100 + b"the turns of one chat " * 100)
    policy.send(ReplicaCharge(), "a", chat, 0)
    for _ in range(10):
        policy.send(ReplicaCharge(), "a", PREFIX, 500)
    assert policy.choose(PREFIX) == "b"
    assert policy.choose(chat) == "a"


def test_without_a_prefix_the_less_loaded_of_two_is_chosen() -> None:
    policy = choice()
    policy.send(ReplicaCharge(), "a", (), 2)
    policy.send(ReplicaCharge(), "b", (), 1)
    counts = Counter(policy.choose(()) for _ in range(300))
    # The most loaded one is never the less loaded of two.
    assert counts["a"] == 0
    assert counts["c"] > counts["b"] > 50


def test_replicas_of_one_load_are_chosen_alike_or_by_what_they_report() -> None:
    policy = choice("ab")
    assert set(Counter(policy.choose(()) for _ in range(100)).values()) <= set(range(25, 76))
    policy.update({"a": ReplicaState(tokens=5_000), "b": ReplicaState(tokens=4_000)})
    assert {policy.choose(()) for _ in range(20)} == {"b"}


def test_a_caller_with_a_small_part_of_the_traffic_has_a_small_part_of_the_bound() -> None:
    policy = choice("ab")
    policy.send(ReplicaCharge(), "a", PREFIX, 8_000)
    assert policy.choose(PREFIX) == "a"
    policy.update({"a": ReplicaState(tokens=16_000), "b": ReplicaState(tokens=16_000)})
    assert policy.limit(0) == 4_096
    assert policy.choose(PREFIX) == "b"
    policy.update({"a": ReplicaState(tokens=10**7), "b": ReplicaState()})
    assert policy.limit(0) == 1_024


def test_callers_that_know_nothing_of_each_other_place_a_prefix_on_the_same_two_replicas() -> None:
    names = "abcdefgh"
    placed = [{choice(names, seed).choose(prefix) for seed in range(12)} for prefix in some_prefixes(40)]
    assert max(map(len, placed)) <= 2
    assert set().union(*placed) == set(names)


def test_where_callers_would_agree_on_replicas_that_are_too_loaded_another_is_chosen() -> None:
    policy = choice()
    for name in "ab":
        policy.send(ReplicaCharge(), name, (), SLACK_TOKENS + 1)
    assert {policy.choose(prefix) for prefix in some_prefixes(20)} == {"c"}


def test_replicas_to_avoid_are_avoided_while_there_are_others() -> None:
    policy = choice()
    policy.send(ReplicaCharge(), "a", PREFIX, 0)
    assert policy.choose(PREFIX, avoid={"a"}) in "bc"
    assert policy.choose(PREFIX, avoid={"a", "b"}) == "c"
    assert policy.choose(PREFIX, avoid={"a", "b", "c"}) == "a"


def test_prefixes_can_be_turned_off() -> None:
    policy = choice("ab", prefixes=False)
    policy.send(ReplicaCharge(), "a", PREFIX, 1)
    assert {policy.choose(prefix) for prefix in (PREFIX, *some_prefixes(20))} == {"b"}


def test_without_replicas_there_is_no_choice() -> None:
    with pytest.raises(LookupError):
        choice("").choose(PREFIX)


def test_replicas_that_come_and_go_change_nothing_for_the_others() -> None:
    policy = choice("abcd")
    # Small requests: the bound has no part in it.
    placed = {prefix: send(policy, prefix, 10) for prefix in some_prefixes(200)}
    assert set(placed.values()) == set("abcd")
    policy.remove("b")
    policy.remove("b")
    policy.update({name: ReplicaState() for name in "ace"})
    for prefix, name in placed.items():
        chosen = policy.choose(prefix)
        assert chosen == name or (name in "bd" and chosen in "ace")
    # A replica with an old name is a new one.
    policy.update({name: ReplicaState() for name in "abcde"})
    assert all(policy.choose(prefix) == name for prefix, name in placed.items() if name in "ac")
    assert [policy.loads[name].tokens for name in "bde"] == [0, 0, 0]


TEXTS = [b"a" * 4_000, b"a" * 2_000 + b"b" * 4_000, b"c" * 700, b"", b"d" * 100_000]
STEP = st.tuples(
    st.sampled_from(["send", "send", "send", "end", "remove", "update", "avoid"]),
    st.integers(0, 99),
    st.integers(0, 60_000),
)


@given(st.lists(STEP, max_size=60), st.integers(0, 9), st.booleans())
def test_the_bound_holds_and_only_replicas_that_live_are_chosen(
    steps: list[tuple[str, int, int]], seed: int, prefixes: bool
) -> None:
    policy = ReplicaChoice(prefixes=prefixes, draw=random.Random(seed))
    there: set[str] = set("abcde")
    policy.update({name: ReplicaState() for name in there})
    sent: list[ReplicaCharge] = []
    for act, which, tokens in steps:
        if act in ("send", "avoid") and there:
            hashes = prefix_hashes(TEXTS[which % len(TEXTS)])
            avoid = set("abcde"[: which % 5]) if act == "avoid" else set()
            open_to = (there - avoid) or there
            before = {name: policy.loads[name].tokens for name in open_to}
            name = policy.choose(hashes, avoid)
            assert name in open_to
            assert before[name] <= policy.limit(min(before.values()))
            sent.append(ReplicaCharge())
            policy.send(sent[-1], name, hashes, tokens)
        elif act == "end" and sent:
            sent.pop(which % len(sent)).release()
        elif act == "remove":
            there.discard("abcde"[which % 5])
            policy.remove("abcde"[which % 5])
        elif act == "update":
            there.add("abcde"[which % 5])
            policy.update({name: ReplicaState(tokens=tokens) for name in there})
    assert set(policy.loads) == there
    assert all(load.tokens >= 0 for load in policy.loads.values())


def test_a_replica_that_sleeps_is_chosen_only_if_all_sleep() -> None:
    policy = choice()
    policy.send(ReplicaCharge(), "b", PREFIX, 0)
    policy.update({"a": ReplicaState(), "b": ReplicaState(asleep=True), "c": ReplicaState()})
    assert {policy.choose(PREFIX) for _ in range(50)} <= {"a", "c"}
    assert {policy.choose(()) for _ in range(50)} == {"a", "c"}
    assert policy.choose((), avoid=["a"]) == "c"
    # Rather one that sleeps than one that has failed the request.
    assert policy.choose((), avoid=["a", "c"]) == "b"
    policy.update(dict.fromkeys("abc", ReplicaState(asleep=True)))
    assert {policy.choose(()) for _ in range(50)} == {"a", "b", "c"}


# Charges

CHARGE_STEPS = st.lists(
    st.tuples(st.sampled_from(["choose", "move", "release", "restart"]), st.integers(0, 3), st.booleans())
)


@given(CHARGE_STEPS)
def test_loads_are_the_sums_of_the_charges_that_have_not_ended(steps: list[tuple[str, int, bool]]) -> None:
    """Tries may be released before a replica is chosen, moved and released again, in any order."""
    policy = choice("ab")
    charges = [ReplicaCharge() for _ in range(4)]
    ended: set[int] = set()
    places: dict[int, str] = {}
    for act, number, second in steps:
        name = "ab"[second]
        if act == "choose":
            policy.send(charges[number], name, PREFIX, 1 << number)
            places[number] = name
        elif act == "move" and number in places:
            policy.move(charges[number], name)
            places[number] = name
        elif act == "release":
            charges[number].release()
            ended.add(number)
        elif act == "restart":
            policy.remove(name)
            policy.update({"a": ReplicaState(), "b": ReplicaState()})
            places = {number: place for number, place in places.items() if place != name}
        for name in "ab":
            on = [number for number, place in places.items() if place == name and number not in ended]
            assert policy.loads[name].tokens == sum(1 << number for number in on)
            assert sum(policy.loads[name].sharing.values()) <= len(on)
    for charge in charges:
        charge.release()
    assert all((load.tokens, load.sharing) == (0, {}) for load in policy.loads.values())


def test_a_charge_stays_in_its_process() -> None:
    request = RelayRequest("POST", "/generate", b"", [], b"{}", charge=ReplicaCharge())
    assert pickle.loads(pickle.dumps(request)).charge is None


# Prefixes


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


def test_all_replicas_together_are_bounded() -> None:
    index = PrefixIndex(most=4 * LEAST_CHUNKS)
    for name in "ab":
        index.add(name, chunks=1_000_000)
    for start in range(0, 100_000, 100):
        index.record("ab"[start // 100 % 2], tuple(range(start, start + 100)))
    assert len(index) == 4 * LEAST_CHUNKS


PREFIXES = st.lists(st.integers(0, 200), max_size=30, unique=True).map(tuple)
INDEX_STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["record", "remove"]), PREFIXES), max_size=60
)


@given(INDEX_STEPS, PREFIXES)
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


# Adapters


def test_what_is_reported_and_what_was_sent_both_count() -> None:
    index = AdapterIndex()
    index.update("a", ["x"], 2)
    index.update("b", [], 2)
    assert index.holders("x") == ["a"]
    assert index.holders("y") == []
    index.record("b", "y")
    index.record("gone", "y")
    assert index.holders("y") == ["b"]
    index.update("a", [], 2)
    assert index.holders("x") == []


def test_no_more_is_remembered_than_a_replica_holds() -> None:
    index = AdapterIndex()
    index.update("a", [], 2)
    for adapter in ("x", "y", "x", "z"):
        index.record("a", adapter)
    assert [name for name in "xyz" if index.holders(name)] == ["x", "z"]


def test_a_removed_replica_holds_nothing() -> None:
    index = AdapterIndex()
    index.update("a", ["x"], None)
    index.remove("a")
    index.remove("a")
    assert index.holders("x") == []
