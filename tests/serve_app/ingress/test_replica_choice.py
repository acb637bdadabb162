"""The policy that chooses a replica."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.facts import prefix_hashes
from serve_app.ingress.replica_choice import (
    CROWD,
    LEAST_CHUNKS,
    LEAST_SLACK_TOKENS,
    SLACK_TOKENS,
    UNTAKEN_S,
    AdapterIndex,
    Charge,
    PrefixIndex,
    ReplicaChoice,
    ReplicaLoads,
    ReplicaState,
)
from tests.batcher.virtual import Clock

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


# Loads


def loads(*names: str, clock: Clock | None = None) -> ReplicaLoads:
    made = ReplicaLoads(clock or Clock())
    for name in names:
        made.add(name)
    return made


def test_a_call_counts_from_its_choice_to_its_end() -> None:
    one = loads("a", "b")
    one.charge("x", "a", 10)
    one.charge("y", "a", 5)
    assert one.tokens == {"a": 15, "b": 0}
    one.end("x", "a")
    one.end("x", "a")
    one.end("unknown", "a")
    assert one.tokens == {"a": 5, "b": 0}


def test_a_call_that_went_elsewhere_counts_there() -> None:
    one = loads("a", "b")
    charge = one.charge("x", "a", 10)
    one.move(charge, "b")
    assert one.tokens == {"a": 0, "b": 10}
    one.end("x", "a")
    assert one.tokens == {"a": 0, "b": 10}
    one.end("x", "b")
    one.move(charge, "a")
    assert one.tokens == {"a": 0, "b": 0}


def test_calls_that_share_a_prefix_are_counted_where_they_are() -> None:
    one = loads("a", "b")
    first = one.charge("x", "a", 10, chunk=5)
    one.charge("y", "a", 10, chunk=5)
    one.charge("z", "a", 10, chunk=6)
    assert (one.sharing("a", 5), one.sharing("b", 5)) == (2, 0)
    one.move(first, "b")
    assert (one.sharing("a", 5), one.sharing("b", 5)) == (1, 1)
    one.end("x", "b")
    one.remove("a")
    assert (one.sharing("a", 5), one.sharing("b", 5)) == (0, 0)


def test_calls_with_one_id_end_one_by_one() -> None:
    one = loads("a", "b")
    one.charge("x", "a", 10)
    one.charge("x", "a", 10)
    one.charge("x", "b", 7)
    one.end("x", "a")
    assert one.tokens == {"a": 10, "b": 7}


def test_a_call_that_no_replica_took_is_given_up() -> None:
    clock = Clock()
    one = loads("a", clock=clock)
    one.charge("taken", "a", 1)
    one.take("taken", "a")
    one.charge("left", "a", 10)
    clock.now = UNTAKEN_S + 1
    one.charge("new", "a", 100)
    assert one.tokens == {"a": 101}


def test_one_of_several_calls_with_one_id_that_no_replica_took_is_given_up() -> None:
    clock = Clock()
    one = loads("a", clock=clock)
    one.charge("x", "a", 10)
    one.charge("x", "a", 10)
    # The caller of the other one has left before a replica had it.
    one.take("x", "a")
    one.end("x", "a")
    clock.now = UNTAKEN_S + 1
    one.charge("new", "a", 100)
    assert one.tokens == {"a": 100}


def test_the_calls_of_a_replica_go_with_it() -> None:
    one = loads("a", "b")
    one.charge("x", "a", 10)
    late = one.charge("y", "b", 5)
    one.remove("a")
    one.add("a")
    one.end("x", "a")
    one.move(late, "gone")
    one.end("y", "gone")
    assert one.tokens == {"a": 0, "b": 0}
    assert one.share() == 1.0


def test_the_share_of_the_traffic_is_that_of_the_reports() -> None:
    one = loads("a", "b")
    assert one.share() == 1.0
    one.charge("x", "a", 25)
    one.reported.update(a=60, b=40)
    assert one.share() == 0.25
    one.charge("y", "b", 100)
    # The reports are older than what was sent.
    assert one.share() == 1.0


@given(st.lists(st.tuples(st.sampled_from(["charge", "end", "move", "release", "flap"]), st.integers(0, 9))))
def test_tokens_are_those_of_the_calls_that_run(steps: list[tuple[str, int]]) -> None:
    one = loads("a", "b")
    running: list[Charge] = []
    for act, number in steps:
        name = "ab"[number % 2]
        if act == "charge":
            running.append(one.charge(str(number), name, number + 1))
        elif act == "flap":
            one.remove(name)
            one.add(name)
            running = [charge for charge in running if charge.replica != name]
        elif running:
            charge = running[number % len(running)]
            if act == "move":
                one.move(charge, name)
                continue
            if act == "end":
                ended = next(
                    each for each in running if each.call == charge.call and each.replica == charge.replica
                )
                one.end(charge.call, charge.replica)
                running.remove(ended)
            else:
                one.release(charge)
                running.remove(charge)
        assert one.tokens == {
            name: sum(charge.tokens for charge in running if charge.replica == name) for name in "ab"
        }


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
