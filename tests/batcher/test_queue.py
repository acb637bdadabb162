"""The ordering rules, one by one, on a clock that is moved by hand."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher import Entry, QueueFull
from tests.batcher.footprint import footprint
from tests.batcher.helpers import add, names, queue_of, taken
from tests.batcher.lines import count_lines
from tests.batcher.virtual import Clock

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
        (
            {"tenant_weights": {"a": -1.0}},
            r"tenant_weights\['a'\] must be a finite number >= 0.000001, not -1.0",
        ),
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


def test_peek_hardly_looks_at_tenants_whose_turn_comes_later() -> None:
    queue = queue_of()
    add(queue, *"ab")
    for number in range(1_000):
        add(queue, "x", tenant=f"t{number}")
    with count_lines() as lines:
        assert names(queue.peek(2)) == "ax"
    assert lines.count < 3_000


def test_peek_hardly_looks_at_tenants_that_have_nothing_left() -> None:
    queue = queue_of()
    add(queue, *"ab")
    for number in range(1_000):
        queue.pick(*add(queue, "x", tenant=f"t{number}"))
    with count_lines() as lines:
        assert names(queue.peek(2)) == "ab"
    assert lines.count < 3_000


def test_picking_from_the_middle_charges_the_tenant() -> None:
    queue = queue_of()
    entries = add(queue, *"aAa", cost=10, tenant="a")
    add(queue, *"bbb", cost=10, tenant="b")
    queue.pick(entries[1])
    assert taken(queue) == "babab"
