"""The ordering rules, one by one, on a clock that is moved by hand."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher import Entry, QueueFull, RequestQueue
from tests.batcher.footprint import footprint
from tests.batcher.virtual import Clock


def queue_of(clock: Clock | None = None, **settings: object) -> RequestQueue[Entry[Any]]:
    return RequestQueue(clock=clock or Clock(), **settings)  # type: ignore[arg-type]


def add(queue: RequestQueue[Entry[Any]], *names: str, cost: int = 1, **fields: object) -> list[Entry[Any]]:
    entries: list[Entry[Any]] = [Entry(name, cost, **fields) for name in names]  # type: ignore[arg-type]
    for entry in entries:
        queue.add(entry)
    return entries


def names(entries: Sequence[Entry[Any]]) -> str:
    return "".join(entry.record for entry in entries)


def taken(queue: RequestQueue[Entry[Any]], budget: int | None = None, max_records: int | None = None) -> str:
    return names(queue.take(budget, max_records))


# Arrival order, budgets


def test_one_tenant_is_served_in_arrival_order() -> None:
    queue = queue_of()
    add(queue, *"abcdef")
    assert taken(queue) == "abcdef"


def test_take_stops_before_the_budget_is_exceeded() -> None:
    queue = queue_of()
    add(queue, *"abc", cost=40)
    assert taken(queue, 100) == "ab"
    assert taken(queue, 100) == "c"


def test_take_fills_the_budget_exactly() -> None:
    queue = queue_of()
    add(queue, *"abc", cost=50)
    assert taken(queue, 100) == "ab"


def test_take_does_not_pass_a_record_that_does_not_fit() -> None:
    queue = queue_of()
    add(queue, "a", cost=60)
    add(queue, "B", cost=60)
    add(queue, "c", cost=10)
    assert taken(queue, 100) == "a"
    assert taken(queue, 100) == "Bc"


def test_a_record_larger_than_the_budget_is_taken_alone() -> None:
    queue = queue_of()
    add(queue, "A", cost=500)
    add(queue, "b", cost=0)
    assert taken(queue, 100) == "A"
    assert taken(queue, 100) == "b"


def test_take_counts_records() -> None:
    queue = queue_of()
    add(queue, *"abcde")
    assert taken(queue, max_records=2) == "ab"
    assert taken(queue, max_records=9) == "cde"
    assert taken(queue) == ""


def test_padded_cost_is_the_longest_times_the_count() -> None:
    queue = queue_of()
    add(queue, "a", cost=10)
    add(queue, "B", cost=40)
    add(queue, "c", cost=10)
    add(queue, "d", cost=10)
    assert names(queue.take(100, padded=True)) == "aB"
    assert names(queue.take(100, padded=True)) == "cd"


# Priority and ageing


def test_lower_priority_goes_first() -> None:
    queue = queue_of()
    add(queue, "c", priority=5)
    add(queue, "b")
    add(queue, "a", priority=-5)
    assert taken(queue) == "abc"


def test_a_waiting_class_gets_one_record_per_ageing_period() -> None:
    clock = Clock()
    queue = queue_of(clock, priority_aging_s=10.0)
    add(queue, *"lllll", priority=1)
    order = ""
    for second in range(36):
        clock.now = float(second)
        add(queue, "h")
        order += taken(queue, max_records=1)
    turns = [second for second, name in enumerate(order) if name == "l"]
    assert len(turns) == 3
    assert all(10 <= later - earlier <= 12 for earlier, later in itertools.pairwise([0, *turns]))


def test_each_level_takes_as_long_again() -> None:
    clock = Clock()
    queue = queue_of(clock, priority_aging_s=10.0)
    add(queue, "l", priority=3)
    order = ""
    for second in range(40):
        clock.now = float(second)
        add(queue, "h")
        order += taken(queue, max_records=1)
    assert order.index("l") == 31


def test_an_old_backlog_does_not_hold_up_a_higher_class() -> None:
    clock = Clock()
    queue = queue_of(clock, priority_aging_s=10.0)
    add(queue, *"l" * 50, priority=1)
    clock.now = 3600.0
    add(queue, *"hhhhh")
    assert taken(queue, max_records=7) == "lhhhhhl"


def test_without_ageing_a_low_class_waits() -> None:
    clock = Clock()
    queue = queue_of(clock, priority_aging_s=None)
    add(queue, "l", priority=1)
    clock.now = 1e9
    add(queue, *"hh")
    assert taken(queue) == "hhl"


def test_a_class_that_was_emptied_starts_to_wait_anew() -> None:
    clock = Clock()
    queue = queue_of(clock, priority_aging_s=10.0)
    add(queue, "h")
    (low,) = add(queue, "x", priority=1)
    queue.remove(low)
    clock.now = 100.0
    add(queue, "l", priority=1)
    clock.now = 105.0
    assert taken(queue) == "hl"


# Fairness


def test_the_tenant_that_was_served_least_goes_first() -> None:
    queue = queue_of()
    add(queue, *"AAA", cost=30, tenant="a")
    add(queue, *"bbbbbb", cost=10, tenant="b")
    assert taken(queue) == "AbbbAbbbA"


def test_weights_share_the_service() -> None:
    queue = queue_of(tenant_weights={"gold": 3.0})
    add(queue, *"g" * 300, tenant="gold")
    add(queue, *"s" * 300, tenant="standard")
    assert Counter(taken(queue, max_records=200)) == {"g": 150, "s": 50}


def test_a_newcomer_has_no_credit_for_the_time_it_was_away() -> None:
    queue = queue_of()
    add(queue, *"a" * 100, tenant="a")
    taken(queue, max_records=50)
    add(queue, *"b" * 100, tenant="b")
    assert Counter(taken(queue, max_records=40)) == {"a": 20, "b": 20}


def test_a_tenant_that_leaves_and_returns_has_no_credit() -> None:
    queue = queue_of()
    add(queue, *"a" * 100, tenant="a")
    add(queue, "b", tenant="b")
    taken(queue, max_records=60)
    add(queue, *"b" * 100, tenant="b")
    assert Counter(taken(queue, max_records=20)) == {"a": 10, "b": 10}


def test_a_tenant_that_leaves_and_returns_keeps_its_debt() -> None:
    queue = queue_of()
    add(queue, *"a" * 100, tenant="a")
    add(queue, "B", cost=30, tenant="b")
    taken(queue, max_records=2)
    add(queue, *"b" * 100, tenant="b")
    assert Counter(taken(queue, max_records=31)) == {"a": 30, "b": 1}


def test_fresh_names_do_not_hold_up_a_tenant() -> None:
    queue = queue_of()
    add(queue, "m", tenant="modest")
    for i in range(50):
        add(queue, "g", tenant=f"greedy-{i}")
    assert taken(queue, max_records=1) == "m"


def test_free_records_do_not_hold_up_a_tenant() -> None:
    queue = queue_of()
    add(queue, *"f" * 100, cost=0, tenant="free")
    add(queue, *"p" * 100, cost=1, tenant="paying")
    assert Counter(taken(queue, max_records=100)) == {"f": 50, "p": 50}


def test_settling_gives_back_what_was_not_used() -> None:
    queue = queue_of()
    add(queue, *"aaaa", cost=100, tenant="a")
    add(queue, *"bbbb", cost=100, tenant="b")
    first, _second = queue.take(max_records=2)
    queue.settle(first, 100, 10)
    assert taken(queue, max_records=3) == "aba"


def test_settling_charges_what_was_used_beyond() -> None:
    queue = queue_of()
    add(queue, *"aaaa", cost=10, tenant="a")
    add(queue, *"bbbb", cost=10, tenant="b")
    (first,) = queue.take(max_records=1)
    queue.settle(first, 10, 35)
    assert taken(queue) == "bbbbaaa"


def test_settling_many_times_leaves_nothing_behind() -> None:
    queue = queue_of()
    add(queue, *"a" * 3000, cost=10, tenant="a")
    add(queue, *"b" * 3000, cost=10, tenant="b")
    before = footprint(queue)
    for _ in range(2000):
        (entry,) = queue.take(max_records=1)
        queue.settle(entry, 10, 9)
    assert footprint(queue) < before


def test_settling_back_and_forth_keeps_the_order() -> None:
    queue = queue_of()
    add(queue, *"a" * 9, cost=10, tenant="a")
    add(queue, *"b" * 9, cost=10, tenant="b")
    for _ in range(4):
        for entry in queue.take(max_records=2):
            queue.settle(entry, 10, 5)
    assert taken(queue, max_records=6) == "ababab"


def test_settling_may_bring_a_tenant_back_to_where_it_was() -> None:
    queue = queue_of()
    add(queue, "a", cost=10, tenant="a")
    add(queue, *"aaa", cost=5, tenant="a")
    add(queue, *"bbb", cost=10, tenant="b")
    first, _second = queue.take(max_records=2)
    queue.settle(first, 10, 5)
    assert taken(queue) == "aabab"


def test_settling_for_a_forgotten_tenant_does_nothing() -> None:
    queue = queue_of()
    (entry,) = add(queue, "a", cost=10)
    queue.take()
    queue.settle(entry, 10, 500)
    add(queue, "a", cost=10)
    assert taken(queue) == "a"


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_served_cost_of_two_backlogged_tenants_stays_within_the_bound(seed: int) -> None:
    # VTC, theorem 4.4: over any interval in which both are backlogged, the services differ by at most
    # 2 max(w_p L_input, w_q M); here a record is charged as a whole, so its cost takes that place.
    rng = random.Random(seed)
    largest = 50
    weights = {"f": rng.choice([0.5, 1.0, 3.0]), "g": 1.0}
    queue = queue_of(tenant_weights=weights)
    add(queue, *"x" * rng.randrange(20), cost=rng.randrange(1, largest), tenant="f")
    queue.take(max_records=rng.randrange(20))
    for tenant in "fg":
        for _ in range(300):
            add(queue, tenant, cost=rng.randint(1, largest), tenant=tenant)
    bound = 2 * largest / min(weights.values())
    served = {"f": 0.0, "g": 0.0}
    gaps = []
    for _ in range(250):
        (entry,) = queue.take(max_records=1)
        served[entry.tenant] += entry.cost / weights[entry.tenant]
        gaps.append(served["f"] - served["g"])
    assert max(gaps) - min(gaps) <= bound


# Cancellation, deadlines, bounds


def test_a_removed_entry_is_skipped_and_its_cost_returns_at_once() -> None:
    queue = queue_of()
    entries = add(queue, *"abc", cost=10)
    assert queue.remove(entries[1])
    assert (len(queue), queue.cost) == (2, 20)
    assert not entries[1].waiting
    assert taken(queue) == "ac"


def test_an_entry_is_removed_once() -> None:
    queue = queue_of()
    (entry,) = add(queue, "a")
    assert queue.remove(entry)
    assert not queue.remove(entry)
    assert (len(queue), queue.cost) == (0, 0)


def test_what_was_taken_can_not_be_removed_or_picked() -> None:
    queue = queue_of()
    (entry,) = add(queue, "a")
    queue.take()
    assert not queue.remove(entry)
    with pytest.raises(ValueError, match="not waiting"):
        queue.pick(entry)


def test_a_tenant_whose_records_were_all_removed_is_not_active() -> None:
    queue = queue_of()
    add(queue, *"a" * 10, tenant="a")
    for entry in add(queue, *"bb", tenant="b"):
        queue.remove(entry)
    assert taken(queue) == "a" * 10


def test_removed_entries_do_not_pile_up() -> None:
    queue = queue_of()
    add(queue, "a")
    for _ in range(10_000):
        (entry,) = add(queue, "x", deadline=1e9, cost=2, priority=0)
        queue.remove(entry)
    assert footprint(queue) < 1_000


def test_an_expired_entry_is_not_taken() -> None:
    clock = Clock()
    queue = queue_of(clock)
    add(queue, "a", deadline=1.0)
    add(queue, "b", deadline=9.0)
    add(queue, "c")
    clock.now = 1.0
    assert taken(queue) == "bc"
    assert names(queue.expire()) == "a"


def test_expire_returns_each_entry_once_and_gives_its_cost_back() -> None:
    clock = Clock()
    queue = queue_of(clock)
    add(queue, *"ab", cost=7, deadline=1.0)
    add(queue, "c", cost=7)
    assert queue.expire() == []
    clock.now = 2.0
    assert names(queue.expire()) == "ab"
    assert queue.expire() == []
    assert (len(queue), queue.cost) == (1, 7)


def test_the_next_deadline_is_the_earliest_of_what_waits() -> None:
    queue = queue_of()
    assert queue.next_deadline() is None
    soon, _late = add(queue, "a", deadline=1.0) + add(queue, "b", deadline=5.0)
    assert queue.next_deadline() == 1.0
    queue.remove(soon)
    assert queue.next_deadline() == 5.0
    queue.take()
    assert queue.next_deadline() is None


def test_a_full_queue_says_which_bound_was_met() -> None:
    queue = queue_of(max_size=2, max_cost=100)
    add(queue, "a", cost=60)
    with pytest.raises(QueueFull, match=r"max_queue_cost=100"):
        add(queue, "b", cost=41)
    add(queue, "b", cost=40)
    with pytest.raises(QueueFull, match=r"max_queue_size=2"):
        add(queue, "c", cost=0)
    assert taken(queue) == "ab"


def test_an_empty_queue_takes_any_one_record() -> None:
    queue = queue_of(max_cost=100)
    add(queue, "a", cost=500)
    assert taken(queue) == "a"


def test_clear_takes_everything_out() -> None:
    queue = queue_of()
    add(queue, *"ab", priority=3, tenant="x")
    add(queue, "c", deadline=5.0)
    assert sorted(names(queue.clear())) == ["a", "b", "c"]
    assert (len(queue), queue.cost, queue.head()) == (0, 0, None)


def test_cost_and_size_ahead_leave_out_lower_classes() -> None:
    queue = queue_of()
    add(queue, "a", cost=10, priority=-1)
    add(queue, *"bb", cost=20)
    add(queue, "c", cost=40, priority=1)
    assert [queue.ahead(p) for p in (-2, -1, 0, 1)] == [(0, 0), (1, 10), (3, 50), (4, 90)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_size": 0}, r"max_size must be a whole number >= 1, not 0"),
        ({"max_cost": -5}, r"max_cost must be a whole number >= 1, not -5"),
        ({"priority_aging_s": 0}, r"priority_aging_s must be a finite number > 0, not 0"),
        ({"tenant_weights": {"a": -1.0}}, r"tenant_weights\['a'\] must be a finite number > 0, not -1.0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        queue_of(**settings)  # type: ignore[arg-type]


# Peeking and picking


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_peek_sees_what_take_takes(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    queue = queue_of(clock, tenant_weights={"t1": 2.0}, priority_aging_s=rng.choice([5.0, None]))
    for _ in range(rng.randrange(100)):
        clock.now += rng.choice([0.0, 1.0, 7.0])
        step = rng.randrange(10)
        if step == 0 and queue.size:
            queue.remove(rng.choice(list(queue)))
        elif step == 1:
            queue.take(max_records=rng.randint(1, 5))
        elif step == 2 and queue.size:
            queue.pick(rng.choice(list(queue)))
        else:
            deadline = rng.choice([None, clock.now + 3])
            queue.add(Entry(None, rng.randrange(10), rng.randint(-1, 2), f"t{rng.randrange(3)}", deadline))
    count = rng.randrange(80)
    seen = queue.peek(count)
    assert len(seen) == min(count, queue.size)
    assert seen == queue.take(max_records=count)


def test_picking_from_the_middle_charges_the_tenant() -> None:
    queue = queue_of()
    entries = add(queue, *"aAa", cost=10, tenant="a")
    add(queue, *"bbb", cost=10, tenant="b")
    queue.pick(entries[1])
    assert taken(queue) == "babab"


# Memory of tenants


def test_tenants_are_forgotten_when_they_owe_nothing() -> None:
    clock = Clock()
    queue = queue_of(clock, max_size=10)

    def use(first: int) -> int:
        for i in range(first, first + 20_000):
            add(queue, *"xxxxx", tenant=f"t{i}", priority=i % 50)
            queue.take()
            clock.now += 1
        return footprint(queue)

    before = use(0)
    assert use(20_000) < 1.1 * before


def test_tenants_are_forgotten_while_another_waits() -> None:
    clock = Clock()
    queue = queue_of(clock)
    add(queue, *"m" * 4000, cost=1, tenant="modest")
    seen = []
    for i in range(30_000):
        add(queue, *"mx", tenant=f"t{i}")
        queue.take(max_records=2)
        clock.now += 1
        if i in (12_000, 29_000):
            seen.append(footprint(queue))
    assert seen[1] < 1.1 * seen[0]


def test_the_memory_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batcher.fair_share.MAX_IDLE_TENANTS", 100)
    clock = Clock()
    queue = queue_of(clock)
    add(queue, "m", tenant="modest", cost=1)
    for i in range(2000):
        add(queue, "x", tenant=f"t{i}", cost=1000)
        queue.pick(next(entry for entry in queue if entry.tenant != "modest"))
    assert footprint(queue) < 5_000


def test_cancelling_again_and_again_leaves_no_trace() -> None:
    queue = queue_of()
    add(queue, "h")
    for _ in range(5000):
        for entry in add(queue, "x", priority=1, tenant="a") + add(queue, "x", tenant="b"):
            queue.remove(entry)
    assert footprint(queue) < 1_000
