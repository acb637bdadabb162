"""Hundreds of replicas on a virtual clock: the rules of the queue at a scale that no machine here has.

Every replica is a `RequestQueue` before a window of token cost. A router sends each request to the less
loaded of two replicas picked at random. Load comes in bursts of nearly twice what the replicas can serve,
from many tenants and one greedy one, in three priority classes; some requests carry a deadline, some are
cancelled. The rules are checked at every step of the run, what follows from them at its end.

There is a replica to a thousand requests.
`make bench NAME=batcher` runs it too, and says how fast it was.
"""

import heapq
import itertools
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import NormalDist, fmean

import pytest

from batcher import Entry, QueueFull, RequestQueue
from batcher.stats import percentiles
from tests.fakes.clock import Clock

REQUESTS_PER_REPLICA = 1_000

CAPACITY = 8_000
"""Tokens that a replica holds at once."""
TOKEN_S = 0.02
"""Seconds for one output token."""
RATE = 6.5
"""Requests per second that a replica can serve, near enough."""
MAX_SIZE = 48
MAX_COST = 20_000
AGING_S = 4.0
CLASSES = (0, 1, 2)
TENANTS = [f"tenant-{number}" for number in range(20)]
GREEDY = "greedy"
BURST_S, CYCLE_S, BURST_LOAD, CALM_LOAD = 10.0, 30.0, 1.8, 0.6


def lognormal(median: float, sigma: float, longest: int, points: int = 4096) -> list[int]:
    """Return lengths that are lognormal when one is picked at random."""
    normal = NormalDist(math.log(median), sigma)
    quantiles = (normal.inv_cdf((point + 0.5) / points) for point in range(points))
    return [max(1, min(longest, round(math.exp(quantile)))) for quantile in quantiles]


PROMPTS = lognormal(200, 0.9, 12_000)
OUTPUTS = lognormal(100, 0.7, 2_000)

DRAIN_S = max(OUTPUTS) * TOKEN_S
"""Seconds after which a window has made space for whatever comes next, at most."""


class State(IntEnum):
    """Where a request is; it only ever moves on, and every move is checked."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    DONE = 3
    EXPIRED = 4
    CANCELLED = 5
    REFUSED = 6


ENDS = frozenset({State.DONE, State.EXPIRED, State.CANCELLED, State.REFUSED})


class Request(Entry[None]):
    """A request on its way."""

    __slots__ = ("arrived", "gives_up", "replica", "run_s", "state")

    replica: "Replica"

    def __init__(self, draw: random.Random, tenant: str, priority: int, arrived: float) -> None:
        prompt = PROMPTS[int(draw.random() * len(PROMPTS))]
        output = OUTPUTS[int(draw.random() * len(OUTPUTS))]
        chance = draw.random()
        deadline = arrived + 50 * chance if chance < 0.1 else None
        super().__init__(None, prompt + output, priority, tenant, deadline)
        self.arrived = arrived
        self.run_s = output * TOKEN_S
        self.gives_up = arrived + 50 * (1 - chance) if chance > 0.97 else None
        self.state = State.NEW


def bursts(
    seed: int, count: int, rate: float, tenants: list[str], priorities: tuple[int, ...] = CLASSES
) -> Iterator[Request]:
    """Yield requests as they arrive: Poisson, at a rate that jumps between calm and burst.

    Args:
        seed: The same seed yields the same requests.
        count: How many.
        rate: Mean requests per second.
        tenants: Whose they are, picked at random.
        priorities: Their classes, picked at random.
    """
    draw = random.Random(seed)
    now = 0.0
    for _ in range(count):
        load = BURST_LOAD if now % CYCLE_S < BURST_S else CALM_LOAD
        now -= math.log(1 - draw.random()) / (rate * load)
        tenant = tenants[int(draw.random() * len(tenants))]
        yield Request(draw, tenant, priorities[int(draw.random() * len(priorities))], now)


def merge(*streams: Iterator[Request]) -> Iterator[Request]:
    """Yield the requests of several streams in the order of their arrival."""
    return heapq.merge(*streams, key=lambda request: request.arrived)


class Replica:
    """A queue before a window of cost.

    `waiting` counts what waits by class; `since` says from when on each class has waited for its turn.
    """

    __slots__ = ("cost", "queue", "running", "since", "waiting")

    def __init__(self, clock: Clock, bounded: bool, aging_s: float | None) -> None:
        self.queue: RequestQueue[Request] = RequestQueue(
            clock=clock,
            max_size=MAX_SIZE if bounded else None,
            max_cost=MAX_COST if bounded else None,
            priority_aging_s=aging_s,
        )
        self.cost = 0
        self.running = 0
        self.waiting = [0] * len(CLASSES)
        self.since = [0.0] * len(CLASSES)


@dataclass
class Outcome:
    """What came of a run; two runs of the same seed are equal.

    Attributes:
        ends: Requests by the state in which they ended.
        waits: Seconds that those that ran had waited, by tenant and priority.
        longest_turn_s: The longest that each class waited for its turn while it had requests.
        fullest: Most requests, and most cost, that ever waited at a replica.
        refused: Requests that two replicas refused, by tenant.
        digest: A number that depends on every start, in order.
        ended_s: Seconds on the virtual clock when all had ended.
    """

    ends: Counter[State] = field(default_factory=Counter)
    waits: dict[tuple[str, int], "array[float]"] = field(default_factory=dict)
    longest_turn_s: list[float] = field(default_factory=lambda: [0.0] * len(CLASSES))
    fullest: tuple[int, int] = (0, 0)
    refused: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    ended_s: float = 0.0

    def waits_of(self, tenants: list[str], *priorities: int) -> list[float]:
        """Return the waits of some tenants in some classes; all classes if none is named."""
        keys = itertools.product(tenants, priorities or CLASSES)
        return [wait for key in keys for wait in self.waits.get(key, ())]


class Simulation:
    """Runs requests over replicas, and checks the rules at each step.

    Args:
        replicas: How many.
        seed: Of the router's choices.
        bounded: Whether the queues have bounds.
        aging_s: Seconds after which a class passes the one above for one request; None: never.
    """

    def __init__(
        self, replicas: int, seed: int, bounded: bool = True, aging_s: float | None = AGING_S
    ) -> None:
        self.clock = Clock()
        self.replicas = [Replica(self.clock, bounded, aging_s) for _ in range(replicas)]
        self.draw = random.Random(seed)
        self.events: list[tuple[float, int, Request]] = []
        self.sequence = itertools.count()
        self.outcome = Outcome()

    def run(self, requests: Iterator[Request]) -> Outcome:
        """Let all requests arrive and end, in the order of virtual time."""
        events = self.events
        for request in requests:
            while events and events[0][0] <= request.arrived:
                self._next_event()
            self.clock.now = request.arrived
            self._arrive(request)
        while events:
            self._next_event()
        self.outcome.ended_s = self.clock.now
        for replica in self.replicas:
            assert len(replica.queue) == replica.queue.cost == replica.running == replica.cost == 0
        return self.outcome

    def _next_event(self) -> None:
        self.clock.now, _, request = heapq.heappop(self.events)
        if request.state is State.RUNNING:
            self._finish(request)
        elif request.state is State.WAITING:
            self._cancel(request)

    def _arrive(self, request: Request) -> None:
        # The power of two choices: nearly as good as asking every replica.
        draw, replicas = self.draw.random, self.replicas
        near = replicas[int(draw() * len(replicas))]
        far = replicas[int(draw() * len(replicas))]
        if near.cost + near.queue.cost > far.cost + far.queue.cost:
            near, far = far, near
        if not self._enter(request, near) and not self._enter(request, far):
            self.outcome.refused[request.tenant] += 1
            self._move(request, State.NEW, State.REFUSED)

    def _enter(self, request: Request, replica: Replica) -> bool:
        queue = replica.queue
        try:
            queue.add(request)
        except QueueFull:
            # Four fifths of it are for all; beyond them a tenant has its share.
            assert len(queue) >= 0.8 * MAX_SIZE - 1 or queue.cost + request.cost > 0.8 * MAX_COST
            return False
        self._move(request, State.NEW, State.WAITING)
        request.replica = replica
        if not replica.waiting[request.priority]:
            replica.since[request.priority] = self.clock.now
        replica.waiting[request.priority] += 1
        self._fill(replica)
        if request.state is State.WAITING and request.gives_up is not None:
            heapq.heappush(self.events, (request.gives_up, next(self.sequence), request))
        most, dearest = self.outcome.fullest
        if len(queue) > most or queue.cost > dearest:
            self.outcome.fullest = max(most, len(queue)), max(dearest, queue.cost)
        return True

    def _fill(self, replica: Replica) -> None:
        """Start what fits, then end what is too late."""
        queue = replica.queue
        while (request := queue.head()) is not None:
            if replica.running and replica.cost + request.cost > CAPACITY:
                break
            queue.pick(request)
            self._start(request, replica)
        for request in queue.expire():
            assert request.deadline is not None
            assert request.deadline <= self.clock.now
            replica.waiting[request.priority] -= 1
            self._move(request, State.WAITING, State.EXPIRED)

    def _start(self, request: Request, replica: Replica) -> None:
        now, priority, outcome = self.clock.now, request.priority, self.outcome
        self._move(request, State.WAITING, State.RUNNING)
        replica.cost += request.cost
        replica.running += 1
        assert replica.cost <= CAPACITY or replica.running == 1
        assert request.deadline is None or now < request.deadline
        turn = now - replica.since[priority]
        outcome.longest_turn_s[priority] = max(outcome.longest_turn_s[priority], turn)
        replica.since[priority] = now
        replica.waiting[priority] -= 1
        wait = now - request.arrived
        key = (request.tenant, priority)
        if key not in outcome.waits:
            outcome.waits[key] = array("d")
        outcome.waits[key].append(wait)
        outcome.digest = hash((outcome.digest, wait, request.cost))
        heapq.heappush(self.events, (now + request.run_s, next(self.sequence), request))

    def _finish(self, request: Request) -> None:
        replica = request.replica
        self._move(request, State.RUNNING, State.DONE)
        replica.cost -= request.cost
        replica.running -= 1
        self._fill(replica)

    def _cancel(self, request: Request) -> None:
        replica = request.replica
        assert replica.queue.remove(request)
        replica.waiting[request.priority] -= 1
        self._move(request, State.WAITING, State.CANCELLED)
        # It may have been the one that did not fit.
        self._fill(replica)

    def _move(self, request: Request, before: State, after: State) -> None:
        assert request.state is before
        request.state = after
        if after in ENDS:
            self.outcome.ends[after] += 1


def simulate(requests: int, seed: int = 1) -> Outcome:
    """Run that many requests, a third of them the greedy tenant's, over a replica to a thousand."""
    replicas = max(2, requests // REQUESTS_PER_REPLICA)
    greedy = requests // 3
    rate = RATE * replicas / requests
    others = bursts(seed, requests - greedy, rate * (requests - greedy), TENANTS)
    return Simulation(replicas, seed + 2).run(
        merge(others, bursts(seed + 1, greedy, rate * greedy, [GREEDY]))
    )


@pytest.fixture(scope="module", params=[40_000, pytest.param(400_000, marks=pytest.mark.long)])
def count(request: pytest.FixtureRequest) -> int:
    """Requests of the large run."""
    requests: int = request.param
    return requests


@pytest.fixture(scope="module")
def outcome(count: int) -> Outcome:
    """The large run. It has asserted at every step that:

    - a request waits once, runs once at most, and ends once (`Simulation._move`);
    - no window holds more than its capacity, but for one request that is larger (`_start`);
    - none starts at its deadline or later, and none expires before it (`_start`, `_fill`);
    - a queue refuses only what is beyond its bounds (`_enter`), and is empty in the end (`run`).
    """
    return simulate(count)


def test_every_request_ends_once(outcome: Outcome, count: int) -> None:
    assert outcome.ends.total() == count
    assert outcome.ends[State.DONE] > 0.9 * count
    assert len(outcome.waits_of([*TENANTS, GREEDY])) == outcome.ends[State.DONE]
    assert outcome.refused.total() == outcome.ends[State.REFUSED]
    assert set(outcome.ends) == ENDS, "the run must show every way to end"


def test_queues_fill_up_to_their_bounds_and_no_further(outcome: Outcome) -> None:
    records, cost = outcome.fullest
    assert records == MAX_SIZE
    assert 0.9 * MAX_COST < cost <= MAX_COST


@pytest.mark.parametrize("point", [0.5, 0.9, 0.99])
def test_a_lower_class_waits_longer(outcome: Outcome, point: float) -> None:
    high, middle, low = (
        percentiles(outcome.waits_of([*TENANTS, GREEDY], priority), [point])[0] for priority in CLASSES
    )
    assert 2 * high < middle
    assert 1.5 * middle < low


def test_every_class_gets_its_turn_in_time(outcome: Outcome) -> None:
    for priority, longest in enumerate(outcome.longest_turn_s):
        assert longest < priority * AGING_S + DRAIN_S


def test_the_greedy_tenant_waits_for_its_own_load(outcome: Outcome) -> None:
    # Nobody in the highest class waits long enough for it to matter.
    for priority in CLASSES[1:]:
        greedy = outcome.waits_of([GREEDY], priority)
        for tenant in TENANTS:
            assert 1.3 * fmean(outcome.waits_of([tenant], priority)) < fmean(greedy)


def test_tenants_alike_are_served_alike(outcome: Outcome) -> None:
    means = [fmean(outcome.waits_of([tenant])) for tenant in TENANTS]
    assert max(means) < 1.3 * min(means)


def test_only_ageing_keeps_the_low_class_from_starving() -> None:
    replicas, count = 10, 10_000

    def longest_turn(aging_s: float | None) -> float:
        overload = bursts(1, count, 2 * RATE * replicas, TENANTS)
        return Simulation(replicas, 2, bounded=False, aging_s=aging_s).run(overload).longest_turn_s[-1]

    assert longest_turn(AGING_S) < 2 * AGING_S + DRAIN_S
    assert longest_turn(None) > 2 * (2 * AGING_S + DRAIN_S)
