"""The policy that chooses a replica."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.facts import prefix_hashes
from serve_app.ingress.replica_choice import (
    CROWD,
    LEAST_SLACK_TOKENS,
    SLACK_TOKENS,
    ReplicaChoice,
    ReplicaState,
)

PREFIX = prefix_hashes(b"a prompt that others share " * 100)


def choice(names: str = "abc", seed: int = 1, **options: float) -> ReplicaChoice:
    made = ReplicaChoice(draw=random.Random(seed), clock=lambda: 0.0, **options)  # type: ignore[arg-type]
    made.update({name: ReplicaState() for name in names})
    return made


def some_prefixes(count: int) -> list[tuple[int, ...]]:
    """Return prefixes of which no two begin alike."""
    return [prefix_hashes(f"{number} ".encode() * 500) for number in range(count)]


def send(policy: ReplicaChoice, prefix: tuple[int, ...] = (), tokens: int = 1_000) -> str:
    name = policy.choose(prefix)
    policy.charge("call", name, prefix, tokens)
    return name


def test_the_replica_with_the_longest_prefix_is_chosen() -> None:
    policy = choice()
    policy.charge("x", "b", PREFIX[:3], 0)
    policy.charge("x", "c", PREFIX, 0)
    assert {policy.choose(PREFIX) for _ in range(20)} == {"c"}
    assert {policy.choose(PREFIX[:3]) for _ in range(20)} == {"b", "c"}


def test_a_replica_that_is_too_loaded_is_not() -> None:
    policy = choice()
    policy.charge("x", "b", PREFIX, SLACK_TOKENS)
    assert policy.choose(PREFIX) == "b"
    policy.charge("x", "b", (), 1)
    assert policy.choose(PREFIX) in "ac"
    # The next longest is taken then.
    policy.charge("x", "a", PREFIX[:3], 10)
    assert policy.choose(PREFIX) == "a"


def test_the_bound_grows_with_the_load() -> None:
    policy = choice("ab")
    policy.charge("x", "a", PREFIX, 499_000)
    policy.charge("x", "b", (), 400_000)
    assert policy.choose(PREFIX) == "a"
    policy.charge("x", "a", (), 2_000)
    assert policy.choose(PREFIX) == "b"


def test_a_short_match_is_none() -> None:
    """A template that all prompts share would send all of them to one replica."""
    policy = choice()
    policy.charge("x", "a", PREFIX[:1], SLACK_TOKENS)
    assert policy.choose((PREFIX[0], 7, 8, 9)) == "a"
    assert {policy.choose((PREFIX[0], 7, n, 9, 9)) for n in range(50)} == {"b", "c"}


def test_a_prefix_that_many_requests_share_is_taken_over_by_an_idle_replica() -> None:
    policy = choice("abc")
    chosen = [send(policy, PREFIX) for _ in range(30)]
    assert len(set(chosen[:CROWD])) == 1
    assert max(Counter(chosen).values()) <= 15
    # It stays as long as the others are half as loaded or more.
    policy = choice("ab")
    policy.charge("x", "a", PREFIX, 1_000)
    policy.charge("x", "b", (), 6_000)
    assert {send(policy, PREFIX) for _ in range(10)} == {"a"}


def test_requests_that_share_more_than_a_frequent_prefix_are_no_crowd() -> None:
    """The turns of one chat go where the chat is, however many chats share its system prompt."""
    policy = choice("ab")
    chat = prefix_hashes(b"a prompt that others share " * 100 + b"the turns of one chat " * 100)
    policy.charge("x", "a", chat, 0)
    for _ in range(10):
        policy.charge("x", "a", PREFIX, 500)
    assert policy.choose(PREFIX) == "b"
    assert policy.choose(chat) == "a"


def test_without_a_prefix_the_less_loaded_of_two_is_chosen() -> None:
    policy = choice()
    policy.charge("x", "a", (), 2)
    policy.charge("x", "b", (), 1)
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
    policy.charge("x", "a", PREFIX, 8_000)
    assert policy.choose(PREFIX) == "a"
    policy.update({"a": ReplicaState(tokens=16_000), "b": ReplicaState(tokens=16_000)})
    assert policy.limit(0) == SLACK_TOKENS / 4
    assert policy.choose(PREFIX) == "b"
    policy.update({"a": ReplicaState(tokens=10**7), "b": ReplicaState()})
    assert policy.limit(0) == LEAST_SLACK_TOKENS


def test_callers_that_know_nothing_of_each_other_place_a_prefix_on_the_same_two_replicas() -> None:
    names = "abcdefgh"
    placed = [{choice(names, seed).choose(prefix) for seed in range(12)} for prefix in some_prefixes(40)]
    assert max(map(len, placed)) <= 2
    assert set().union(*placed) == set(names)


def test_where_callers_would_agree_on_replicas_that_are_too_loaded_another_is_chosen() -> None:
    policy = choice()
    for name in "ab":
        policy.charge("x", name, (), SLACK_TOKENS + 1)
    assert {policy.choose(prefix) for prefix in some_prefixes(20)} == {"c"}


def test_replicas_to_avoid_are_avoided_while_there_are_others() -> None:
    policy = choice()
    policy.charge("x", "a", PREFIX, 0)
    assert policy.choose(PREFIX, avoid={"a"}) in "bc"
    assert policy.choose(PREFIX, avoid={"a", "b"}) == "c"
    assert policy.choose(PREFIX, avoid={"a", "b", "c"}) == "a"


def test_prefixes_can_be_turned_off() -> None:
    policy = choice("ab", prefixes=False)
    policy.charge("x", "a", PREFIX, 1)
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
    assert [policy.loads.tokens[name] for name in "bde"] == [0, 0, 0]


TEXTS = [b"a" * 4_000, b"a" * 2_000 + b"b" * 4_000, b"c" * 700, b"", b"d" * 100_000]
STEP = st.tuples(
    st.sampled_from(["send", "send", "send", "end", "remove", "update", "avoid"]),
    st.integers(0, 99),
    st.integers(0, 60_000),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(STEP, max_size=60), st.integers(0, 9), st.booleans())
def test_the_bound_holds_and_only_replicas_that_live_are_chosen(
    steps: list[tuple[str, int, int]], seed: int, prefixes: bool
) -> None:
    policy = ReplicaChoice(prefixes=prefixes, draw=random.Random(seed), clock=lambda: 0.0)
    there: set[str] = set("abcde")
    policy.update({name: ReplicaState() for name in there})
    sent: list[tuple[str, str]] = []
    for number, (act, which, tokens) in enumerate(steps):
        if act in ("send", "avoid") and there:
            hashes = prefix_hashes(TEXTS[which % len(TEXTS)])
            avoid = set("abcde"[: which % 5]) if act == "avoid" else set()
            open_to = (there - avoid) or there
            before = {name: policy.loads.tokens[name] for name in open_to}
            name = policy.choose(hashes, avoid)
            assert name in open_to
            assert before[name] <= policy.limit(min(before.values()))
            policy.charge(str(number), name, hashes, tokens)
            sent.append((str(number), name))
        elif act == "end" and sent:
            policy.loads.end(*sent.pop(which % len(sent)))
        elif act == "remove":
            there.discard("abcde"[which % 5])
            policy.remove("abcde"[which % 5])
        elif act == "update":
            there.add("abcde"[which % 5])
            policy.update({name: ReplicaState(tokens=tokens) for name in there})
    assert set(policy.loads.tokens) == there
    assert min(policy.loads.tokens.values(), default=0) >= 0


def test_a_replica_that_sleeps_is_chosen_only_if_all_sleep() -> None:
    policy = choice()
    policy.charge("x", "b", PREFIX, 0)
    policy.update({"a": ReplicaState(), "b": ReplicaState(asleep=True), "c": ReplicaState()})
    assert {policy.choose(PREFIX) for _ in range(50)} <= {"a", "c"}
    assert {policy.choose(()) for _ in range(50)} == {"a", "c"}
    assert policy.choose((), avoid=["a"]) == "c"
    # Rather one that sleeps than one that has failed the request.
    assert policy.choose((), avoid=["a", "c"]) == "b"
    policy.update(dict.fromkeys("abc", ReplicaState(asleep=True)))
    assert {policy.choose(()) for _ in range(50)} == {"a", "b", "c"}
