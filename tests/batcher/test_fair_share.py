"""Fairness between tenants: turns, weights, and what is remembered of them."""

import heapq
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher import Entry, RequestQueue
from batcher.fair_share import Backlog, Tenant
from batcher.stats import percentiles
from tests.batcher.footprint import footprint
from tests.batcher.helpers import add, queue_of, taken
from tests.batcher.virtual import Clock


def by_tenant(queue: RequestQueue[Entry[Any]], records: int) -> Counter[str]:
    """Take records, and return how many there are of each tenant."""
    return Counter(entry.tenant for entry in queue.take(max_records=records))


# Order


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


def test_settling_gives_no_credit_in_a_tier_that_was_empty_since() -> None:
    queue = queue_of()
    (first,) = add(queue, "a", cost=100, tenant="a")
    queue.take()
    add(queue, *"aa", cost=10, tenant="a")
    add(queue, *"bb", cost=10, tenant="b")
    queue.settle(first, 100, 10)
    assert taken(queue) == "abab"


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


def test_large_costs_keep_a_queue_fair() -> None:
    queue = queue_of(tenant_weights={"a": 1e-6})
    largest = 2**53
    queue.add(Entry("x", largest, tenant="a"))
    queue.add(Entry("y", largest, tenant="a"))
    for number in range(3):
        queue.add(Entry(number, largest, tenant="b"))
    queue.take(max_records=3)
    for tenant in "cd":
        for _ in range(100):
            queue.add(Entry(None, 1, tenant=tenant))
    served = by_tenant(queue, 101)
    assert abs(served["c"] - served["d"]) <= 1


# Load

TOKENS_PER_S = 10_000.0


def waits_of_modest(greedy_load: float, *, fair: bool = True, seconds: float = 30.0) -> list[float]:
    """Serve a modest tenant (20% of the capacity) beside a greedy one, and return the modest one's waits.

    Args:
        greedy_load: What the greedy tenant sends, as a share of the capacity, beside a first backlog of
            a few seconds.
        fair: Tell the queue which tenant is which.
        seconds: How long they send.
    """
    clock = Clock()
    queue = queue_of(clock)
    arrivals: list[tuple[float, str, int]] = []
    for tenant, load in (("modest", 0.2), ("greedy", greedy_load)):
        rng = random.Random(tenant)
        at = 0.0
        while at < seconds:
            cost = rng.randint(50, 500)
            arrivals.append((at, tenant, cost))
            at += rng.expovariate(load * TOKENS_PER_S / 275)
    arrivals += [(0.0, "greedy", 275)] * 100
    heapq.heapify(arrivals)
    waits = []
    while clock.now < seconds:
        while arrivals and arrivals[0][0] <= clock.now:
            at, tenant, cost = heapq.heappop(arrivals)
            queue.add(Entry((at, tenant), cost, tenant=tenant if fair else "everybody"))
        for entry in queue.take(max_records=1):
            at, tenant = entry.record
            if tenant == "modest":
                waits.append(clock.now - at)
            clock.now += entry.cost / TOKENS_PER_S
        if not queue.size and arrivals:
            clock.now = max(clock.now, arrivals[0][0])
    return waits


def p99(waits: list[float]) -> float:
    return percentiles(waits, [0.99])[0]


def test_a_hundred_times_the_load_of_one_tenant_hardly_moves_the_wait_of_another() -> None:
    before = waits_of_modest(1.0)
    after = waits_of_modest(100.0)
    assert len(after) > 150
    assert p99(after) < 1.1 * p99(before)


def test_without_tenants_the_modest_one_would_wait_behind_the_greedy_one() -> None:
    assert p99(waits_of_modest(3.0, fair=False)) > 100 * p99(waits_of_modest(3.0))


@pytest.mark.parametrize("tenants", [2, 100, 5_000])
def test_all_backlogged_tenants_are_served_alike(tenants: int) -> None:
    queue = queue_of()
    rng = random.Random(tenants)
    for i in range(4 * tenants):
        queue.add(Entry(None, rng.randint(1, 9), tenant=f"t{i % tenants}"))
    served: Counter[str] = Counter()
    for _ in range(2 * tenants):
        (entry,) = queue.take(max_records=1)
        served[entry.tenant] += entry.cost
    assert len(served) == tenants
    assert max(served.values()) - min(served.values()) <= 2 * 9


# Weights


def share_of_a(queue: RequestQueue[Entry[Any]], records: int) -> float:
    served = by_tenant(queue, records)
    return served["a"] / served.total()


def test_a_weight_may_change_while_records_wait() -> None:
    queue = queue_of()
    for i in range(400):
        queue.add(Entry(None, 1, tenant="ab"[i % 2]))

    assert share_of_a(queue, 40) == 0.5
    queue.tenants.weigh("a", 3.0)
    assert share_of_a(queue, 80) == pytest.approx(0.75, abs=0.05)
    queue.tenants.weigh("a", 1.0)
    assert share_of_a(queue, 40) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="weight"):
        queue.tenants.weigh("a", 0)


def test_a_weight_given_before_a_tenant_comes_holds_from_its_first_record() -> None:
    queue = queue_of()
    queue.tenants.weigh("a", 3.0)
    for i in range(80):
        queue.add(Entry(None, 1, tenant="ab"[i % 2]))
    assert by_tenant(queue, 40)["a"] == 30


def test_weights_of_single_tenants_are_bounded_and_can_be_taken_back() -> None:
    queue = queue_of(tenant_weights={"a": 3.0})
    for number in range(20_000):
        queue.tenants.weigh(f"t{number}", 2.0)
    assert footprint(queue) < 15_000
    for _ in range(40):
        queue.add(Entry(None, 1, tenant="a"))
        queue.add(Entry(None, 1, tenant="b"))

    assert share_of_a(queue, 16) == pytest.approx(0.75)
    queue.tenants.weigh("a", 1.0)
    assert share_of_a(queue, 16) == pytest.approx(0.5)
    queue.tenants.weigh("a", None)
    assert share_of_a(queue, 16) == pytest.approx(0.75)


def test_weights_that_are_taken_back_push_no_other_out() -> None:
    queue = queue_of()
    queue.tenants.weigh("a", 3.0)
    for number in range(20_000):
        queue.tenants.weigh(f"t{number}", 2.0)
        queue.tenants.weigh(f"t{number}", None)
    for _ in range(40):
        queue.add(Entry(None, 1, tenant="a"))
        queue.add(Entry(None, 1, tenant="b"))
    assert share_of_a(queue, 16) == pytest.approx(0.75)


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


def test_refusals_in_many_tiers_leave_little_behind() -> None:
    tenant = Tenant("t")
    for priority in range(10_000, 0, -1):
        Backlog(tenant).retry_after(priority, 1.0, now=0.0)
    assert footprint(tenant) < 300


def test_cancelling_again_and_again_leaves_no_trace() -> None:
    queue = queue_of()
    add(queue, "h")
    for _ in range(5000):
        for entry in add(queue, "x", priority=1, tenant="a") + add(queue, "x", tenant="b"):
            queue.remove(entry)
    assert footprint(queue) < 1_000


def test_tiers_are_forgotten_with_their_last_entry() -> None:
    queue = queue_of()
    for priority in range(20_000):
        queue.add(Entry("high", 1, -1))
        queue.add(Entry("low", 1, priority))
        queue.take(max_records=2)
    assert footprint(queue) < 5_000
