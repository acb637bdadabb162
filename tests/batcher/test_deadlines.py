"""Deadlines of what waits in a queue."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batcher import Entry
from tests.batcher.footprint import footprint
from tests.batcher.helpers import add, names, queue_of, taken
from tests.batcher.virtual import Clock

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove", "again", "take", "tick"]), st.integers(0, 9)),
    max_size=100,
)


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


@given(STEPS)
def test_each_deadline_counts_once_while_its_entry_waits(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    queue = queue_of(clock)
    waiting: list[Entry[Any]] = []
    left: list[Entry[Any]] = []

    def due(entry: Entry[Any]) -> float:
        return math.inf if entry.deadline is None else entry.deadline

    for step, number in steps:
        if step == "add":
            waiting += add(
                queue, "x", tenant=f"t{number % 3}", deadline=clock.now + number if number else None
            )
        elif step == "remove" and waiting:
            left.append(waiting.pop(number % len(waiting)))
            assert queue.remove(left[-1])
        elif step == "again" and left:
            waiting.append(left.pop())
            queue.add(waiting[-1])
        elif step == "take":
            for entry in queue.take(max_records=number):
                # An entry that has expired is passed over.
                assert due(entry) > clock.now
                waiting.remove(entry)
        elif step == "tick":
            clock.now += number / 4
        late = [entry for entry in waiting if due(entry) <= clock.now]
        waiting = [entry for entry in waiting if entry not in late]
        expired = queue.expire()
        assert {*map(id, expired)} == {*map(id, late)}
        assert len(expired) == len(late)
        earliest = min(map(due, waiting), default=math.inf)
        assert queue.next_deadline() == (None if earliest == math.inf else earliest)


def test_deadlines_of_what_has_left_are_forgotten() -> None:
    queue = queue_of()
    add(queue, "stays", deadline=5.0)
    for _ in range(20_000):
        (entry,) = add(queue, "leaves", deadline=9.0)
        queue.remove(entry)
    assert footprint(queue) < 5_000
    assert queue.next_deadline() == 5.0
