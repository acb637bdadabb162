"""Limits, waits and rates."""

from collections import deque
from itertools import count
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import BatchStats
from batcher.stats import ContinuousStats
from serve_app.api.protocol import JSON
from serve_app.client import Backoff
from serve_app.rows.pacing import (
    Auto,
    EngineLoad,
    Fixed,
    Rate,
    engine_load,
)
from serve_app.stats import ReplicaStats
from tests.fakes.clock import Clock


@given(st.integers(1, 2000), st.none() | st.floats(0, 600))
def test_a_wait_is_bounded_and_no_shorter_than_asked(failures: int, asked: float | None) -> None:
    wait = Backoff(0.5, 30.0).wait_s(failures, asked)
    assert wait >= (asked or 0.0)
    assert wait >= 0.25
    assert wait <= max(30.0, 1.25 * (asked or 0.0))


def test_waits_double() -> None:
    waits = [Backoff(1.0, 1000.0).wait_s(failures) for failures in range(1, 8)]
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits))


def test_a_fixed_limit_stays() -> None:
    fixed = Fixed(7)
    fixed.refused(1.0)
    fixed.observe(EngineLoad(0, 0, 100), 7)
    assert fixed.limit == 7


def test_auto_grows_while_too_little_waits() -> None:
    adaptive = Auto(first=4, most=20, clock=Clock())
    adaptive.observe(EngineLoad(64, 10), 4)
    assert adaptive.limit == 4, "nothing has been answered yet"
    adaptive.answered()
    limits = []
    for _ in range(12):
        adaptive.observe(EngineLoad(64, 10), adaptive.limit)
        limits.append(adaptive.limit)
    assert limits == sorted(limits)
    assert limits[:2] == [5, 6]
    assert limits[-1] == 20


def test_auto_begins_with_no_more_than_its_highest_limit() -> None:
    adaptive = Auto(most=2, clock=Clock())
    assert adaptive.limit == 2
    adaptive.answered()
    adaptive.observe(EngineLoad(2, 0, 100), 2)
    assert adaptive.limit == 2


def test_auto_fills_free_places_before_the_first_answer() -> None:
    adaptive = Auto(first=4, most=1000, clock=Clock())
    adaptive.observe(EngineLoad(0, 0, 200), 4)
    assert adaptive.limit == 4, "no call has come to an engine yet"
    adaptive.observe(EngineLoad(4, 0, 196), 4)
    assert adaptive.limit == 16
    adaptive.observe(EngineLoad(16, 0, 184), 16)
    assert adaptive.limit == 64
    adaptive.observe(EngineLoad(64, 0, 136), 64)
    assert adaptive.limit == 200
    adaptive.observe(EngineLoad(200, 0, 0), 200)
    assert adaptive.limit == 200
    adaptive.answered()
    adaptive.observe(EngineLoad(200, 0, 0), 200)
    assert adaptive.limit == 250


def test_a_limit_that_is_not_in_use_does_not_grow() -> None:
    adaptive = Auto(first=8, clock=Clock())
    adaptive.answered()
    adaptive.observe(EngineLoad(5, 0, 100), 5)
    assert adaptive.limit == 8
    adaptive.observe(None, 5)
    assert adaptive.limit == 8
    adaptive.observe(None, 8)
    assert adaptive.limit == 10


def test_auto_shrinks_while_too_much_waits_and_keeps_the_limit_in_between() -> None:
    adaptive = Auto(first=8, clock=Clock())
    adaptive.answered()
    adaptive.observe(EngineLoad(64, 100, 0), 8)
    assert adaptive.limit == 8
    adaptive.observe(EngineLoad(64, 400, 0), 8)
    assert adaptive.limit == 7


def test_auto_looks_again_soon_only_while_it_grows() -> None:
    adaptive = Auto(first=8, clock=Clock())
    assert adaptive.interval_s == 0.25
    adaptive.observe(EngineLoad(8, 0, 8), 8)
    assert adaptive.interval_s == 0.25
    adaptive.observe(EngineLoad(16, 20, 0), 16)
    assert adaptive.interval_s == 1.0
    # Without the load, growth is a guess.
    adaptive.answered()
    adaptive.observe(None, 16)
    assert adaptive.limit == 20
    assert adaptive.interval_s == 1.0


def test_auto_halves_once_for_the_429s_of_one_moment() -> None:
    clock = Clock()
    adaptive = Auto(first=16, clock=clock)
    adaptive.answered()
    for _ in range(10):
        adaptive.refused(5.0)
    adaptive.observe(EngineLoad(1, 0, 100), 16)
    assert adaptive.limit == 8
    clock.now = 5.1
    adaptive.refused(None)
    assert adaptive.limit == 4
    for _ in range(10):
        clock.now += 10
        adaptive.refused(None)
    assert adaptive.limit == 1


def test_after_a_refusal_free_places_say_nothing_for_a_while() -> None:
    clock = Clock()
    adaptive = Auto(first=16, clock=clock)
    adaptive.answered()
    adaptive.refused(None)
    clock.now = 1.1
    adaptive.observe(EngineLoad(8, 0, 100), 8)
    assert adaptive.limit == 10
    assert adaptive.interval_s == 1.0
    clock.now = 31.1
    adaptive.observe(EngineLoad(10, 0, 100), 10)
    assert adaptive.limit == 40


def test_auto_finds_the_capacity_of_a_service() -> None:
    # The service runs 64 records at once.
    adaptive = Auto(clock=Clock())
    adaptive.answered()
    for _ in range(100):
        inside = adaptive.limit
        load = EngineLoad(min(64, inside), max(0, inside - 64), max(0, 64 - inside))
        adaptive.observe(load, adaptive.limit)
    assert 64 <= adaptive.limit <= 64 * 5


STEP_S, WAY_S = 0.01, 0.03
"""Seconds of a step of the fleet below, and of the way of a call to it."""


class Fleet:
    """Engines on a virtual clock. Live records come at a steady rate and go first.

    Args:
        places: Records that run at once.
        record_s: Seconds that a record runs.
        live: Share of the places that live traffic takes.

    Attributes:
        running: Ends of the records that run, and their calls; None: a live one.
        waiting: Calls of the records that wait.
        most_waiting: Most of them so far.
    """

    def __init__(self, places: int, record_s: float, live: float) -> None:
        self.clock = Clock()
        self.running: deque[tuple[float, int | None]] = deque()
        self.waiting: deque[int] = deque()
        self.most_waiting = 0
        self._pace = Auto(most=100_000, clock=self.clock)
        self._places, self._record_s = places, record_s
        self._live_per_step = live * places / record_s * STEP_S
        self._live_due = 0.0
        self._numbers = count()
        self._left: set[int] = set()
        self._on_their_way: deque[tuple[float, int]] = deque()
        self._look_at = self._pace.interval_s

    def step(self) -> None:
        """Let time pass."""
        self.clock.now += STEP_S
        now = self.clock.now
        while self.running and self.running[0][0] <= now:
            self._end(self.running.popleft()[1])
        while self._on_their_way and self._on_their_way[0][0] <= now:
            self.waiting.append(self._on_their_way.popleft()[1])
        self._live_due += self._live_per_step
        while len(self.running) < self._places and (self._live_due >= 1 or self.waiting):
            live = self._live_due >= 1
            self._live_due -= live
            self.running.append((now + self._record_s, None if live else self.waiting.popleft()))
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        if now >= self._look_at:
            free = max(0, self._places - len(self.running) - len(self.waiting))
            self._pace.observe(EngineLoad(len(self.running), len(self.waiting), free), len(self._left))
            self._look_at = now + self._pace.interval_s
        while len(self._left) < self._pace.limit:
            call = next(self._numbers)
            self._left.add(call)
            self._on_their_way.append((now + WAY_S, call))

    def _end(self, call: int | None) -> None:
        if call is not None:
            self._left.remove(call)
            self._pace.answered()


@pytest.mark.parametrize("live", [0.0, 0.5])
@pytest.mark.parametrize("record_s", [0.5, 60.0])
@pytest.mark.parametrize("places", [8, 256, 1000])
def test_auto_fills_an_idle_fleet_in_two_seconds_and_no_queue(
    places: int, record_s: float, live: float
) -> None:
    fleet = Fleet(places, record_s, live)
    while len(fleet.running) < places:
        fleet.step()
    assert fleet.clock.now < 2.0
    busy = []
    for _ in range(2000):
        fleet.step()
        busy.append(len(fleet.running) / places)
    assert mean(busy) > 0.97
    # About as many as run, unless the first calls are too many already.
    assert fleet.most_waiting <= max(2 * places, 4)


def replica(**stats: Any) -> ReplicaStats:
    values = {"capacity": 1_000_000, "max_running": 64} | stats
    return ReplicaStats(replica="a", batcher=ContinuousStats(**values))


@pytest.mark.parametrize(
    ("stats", "free"),
    [
        ({}, 64),
        ({"running": 10, "running_cost": 10}, 54),
        ({"running": 64, "running_cost": 64}, 0),
        # 20 records of 100 tokens fit.
        ({"running": 10, "running_cost": 1000, "capacity": 2000}, 10),
        ({"running": 3, "running_cost": 1000, "capacity": 1100}, 0),
        ({"running": 70, "running_cost": 70}, 0),
        ({"running": 10, "running_cost": 10, "queue_depth": 4}, 50),
        # Live traffic runs beside a background that fills the engine.
        ({"running": 10, "running_cost": 1200, "capacity": 1000}, 0),
    ],
)
def test_free_places_are_bounded_by_records_and_tokens(stats: JSON, free: int) -> None:
    load = engine_load([replica(**stats)])
    assert load
    assert load.free == free


def test_replicas_are_added_up() -> None:
    full = replica(running=64, running_cost=64, queue_depth=100)
    assert engine_load([full, replica(), replica(queue_depth=3)]) == EngineLoad(64, 103, 64 + 61)
    assert engine_load([]) is None
    assert engine_load([ReplicaStats(replica="b")]) is None


def test_the_places_of_a_function_are_not_known() -> None:
    function = ReplicaStats(replica="b", batcher=BatchStats(running=2, queue_depth=3))
    assert engine_load([function, replica()]) == EngineLoad(2, 3, None)


def test_the_rate_is_that_of_the_last_minute_with_rows() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    assert rate.per_s == 0
    for second in range(200):
        now = float(second)
        rate.add(5 if second < 100 else 20)
    assert rate.total == 500 + 2000
    assert rate.per_s == pytest.approx(20, rel=0.05)
    now += 600
    assert rate.per_s == pytest.approx(20, rel=0.05)


def test_one_group_of_rows_is_no_rate() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    rate.add(100)
    assert rate.per_s == 0


def test_a_rate_falls_while_no_rows_come() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    for second in range(11):
        now = float(second)
        rate.add(10)
    assert rate.per_s == pytest.approx(10)
    now = 20.0
    assert rate.per_s == pytest.approx(5)
