"""What one tenant does to another, on a simulated clock."""

import heapq
import random
from collections import Counter
from typing import Any

import pytest

from batcher import Entry, RequestQueue
from batcher.stats import percentiles
from tests.batcher.virtual import Clock

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
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=clock)
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
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock())
    rng = random.Random(tenants)
    for i in range(4 * tenants):
        queue.add(Entry(None, rng.randint(1, 9), tenant=f"t{i % tenants}"))
    served: Counter[str] = Counter()
    for _ in range(2 * tenants):
        (entry,) = queue.take(max_records=1)
        served[entry.tenant] += entry.cost
    assert len(served) == tenants
    assert max(served.values()) - min(served.values()) <= 2 * 9


def test_a_weight_may_change_while_records_wait() -> None:
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock())
    for i in range(400):
        queue.add(Entry(None, 1, tenant="ab"[i % 2]))

    def share(records: int) -> float:
        taken = [entry.tenant for entry in queue.take(max_records=records)]
        return taken.count("a") / len(taken)

    assert share(40) == 0.5
    queue.tenants.weigh("a", 3.0)
    assert share(80) == pytest.approx(0.75, abs=0.05)
    queue.tenants.weigh("a", 1.0)
    assert share(40) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="weight"):
        queue.tenants.weigh("a", 0)


def test_a_weight_given_before_a_tenant_comes_holds_from_its_first_record() -> None:
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock())
    queue.tenants.weigh("a", 3.0)
    for i in range(80):
        queue.add(Entry(None, 1, tenant="ab"[i % 2]))
    taken = [entry.tenant for entry in queue.take(max_records=40)]
    assert taken.count("a") == 30
