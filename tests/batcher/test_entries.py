"""The entry: one place at a time, and nothing kept after its end."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from batcher import Entry
from tests.batcher.helpers import dynamic_batcher, queue_of, results_of
from tests.batcher.virtual import virtual


def test_an_entry_waits_in_one_place() -> None:
    queue = queue_of()
    entries: list[Entry[Any]] = [Entry(name, 1, deadline=9.0) for name in "abc"]
    entry, other, third = entries
    queue.add(entry)
    with pytest.raises(ValueError, match="waits already"):
        queue.add(entry)
    queue.add(other)
    queue.add(third)
    # Taken out of the middle, and put in again: it is behind the others, and there once.
    assert queue.remove(other)
    queue.add(other)
    assert [each.record for each in queue.take()] == ["a", "c", "b"]
    assert not queue.total


@virtual
async def test_a_record_is_let_go_when_it_has_ended() -> None:
    class Record:
        pass

    async def process(batch: list[Record]) -> list[int]:
        await asyncio.sleep(1)
        return [0] * len(batch)

    async with dynamic_batcher(process) as batcher:
        records = [Record() for _ in range(3)]
        watch = [weakref.ref(record) for record in records]
        futures = [await batcher.submit(record) for record in records]
        futures[1].cancel()
        del records
        await results_of(futures)
        gc.collect()
        assert [reference() for reference in watch] == [None] * 3


async def test_a_cancel_is_told_once_and_lets_the_record_go() -> None:
    told: list[Entry[Any]] = []
    entry: Entry[Any] = Entry("x", 1, loop=asyncio.get_running_loop(), withdraw=told.append)
    assert entry.cancel()
    assert not entry.cancel()
    assert told == [entry]
    assert (entry.record, entry.cancelled()) == (None, True)


async def test_an_entry_that_has_failed_can_not_be_cancelled() -> None:
    told: list[Entry[Any]] = []
    entry: Entry[Any] = Entry("x", 1, loop=asyncio.get_running_loop(), withdraw=told.append)
    entry.fail(KeyError("gone"))
    assert not entry.cancel()
    assert told == []
    with pytest.raises(KeyError, match="gone"):
        await entry
    assert entry.record is None


def test_an_entry_waits_from_its_admission_until_it_is_taken() -> None:
    queue = queue_of()
    entry: Entry[Any] = Entry("x", 1.2, tenant="anna", priority=2)  # type: ignore[arg-type]
    seen = [entry.waiting]
    queue.add(entry)
    seen.append(entry.waiting)
    assert queue.take() == [entry]
    assert [*seen, entry.waiting] == [False, True, False]
    assert repr(entry) == "<Entry of 'anna', cost 2, priority 2>"
