"""The queue by itself: shares of tenants, and memory and time whatever comes. `Order` states its order."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import QueueFull
from tests.batcher.footprint import footprint
from tests.batcher.helpers import add, queue_of
from tests.batcher.lines import count_lines
from tests.fakes.clock import Clock


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
    add(queue, "x", "y", cost=largest, tenant="a")
    add(queue, "1", "2", "3", cost=largest, tenant="b")
    queue.take(max_records=3)
    for tenant in "cd":
        add(queue, *"x" * 100, tenant=tenant)
    served = Counter(entry.tenant for entry in queue.take(max_records=101))
    assert abs(served["c"] - served["d"]) <= 1


def test_an_empty_queue_takes_an_entry_beyond_its_bounds() -> None:
    queue = queue_of(max_size=4, max_cost=100)
    add(queue, "large", cost=500, records=7)
    with pytest.raises(QueueFull, match="max_queue_size=4"):
        add(queue, "small")
    assert [entry.record for entry in queue.take()] == ["large"]
    assert queue.total == 0


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("passes_s", [0.0, 1.0])
def test_what_has_left_is_forgotten(passes_s: float, stays: bool) -> None:
    clock = Clock()
    queue = queue_of(clock)
    if stays:
        add(queue, "stays")
    seen = []
    for number in range(29_001):
        tenant = f"t{number}"
        queue.tenants.weigh(tenant, 2.0)
        (entry,) = add(
            queue, "leaves", tenant=tenant, priority=0 if stays else number % 50, deadline=clock.now + 1e6
        )
        if number % 2:
            queue.remove(entry)
        else:
            queue.pick(entry)
        clock.now += passes_s
        if number in (14_000, 29_000):
            seen.append(footprint(queue))
    assert seen[1] < 1.2 * seen[0]


@pytest.mark.parametrize("leave", [False, True])
def test_peek_hardly_looks_at_other_tenants(leave: bool) -> None:
    queue = queue_of()
    add(queue, *"ab")
    for number in range(1_000):
        entries = add(queue, "x", tenant=f"t{number}")
        if leave:
            queue.pick(*entries)
    with count_lines() as lines:
        assert [entry.record for entry in queue.peek(2)] == [*("ab" if leave else "ax")]
    assert lines.count < 3_000
