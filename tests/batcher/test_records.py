"""Slots that stand for several records: they start together, and count as many everywhere."""

import asyncio
import pickle
from typing import Any

import pytest

from batcher import Closed, Entry, Expired, Oversize, QueueFull
from tests.batcher.helpers import Holders, continuous_batcher, queue_of
from tests.batcher.virtual import blocked, virtual


@pytest.mark.parametrize("bound", ["max_running", "places"])
@virtual
async def test_the_records_of_a_slot_take_as_many_places(bound: str) -> None:
    options = {"max_running": 4} | ({} if bound == "max_running" else {"places": 4})
    async with continuous_batcher(1_000, **options) as batcher:
        holders = Holders(batcher)
        await holders.enter("three", 1, records=3)
        await holders.enter("two", 1, records=2)
        assert holders.started == ["three"]
        assert (batcher.stats.running, batcher.stats.queue_depth) == (3, 2)
        await holders.leave("three")
        assert holders.started == ["three", "two"]
        assert batcher.stats.running == 2
        await holders.leave_all()


@virtual
async def test_later_ones_do_not_pass_a_slot_that_waits_for_all_its_places() -> None:
    async with continuous_batcher(1_000, max_running=4) as batcher:
        holders = Holders(batcher)
        for name in "abc":
            await holders.enter(name, 1)
        await holders.enter("all", 1, records=4)
        await holders.enter("later", 1)
        # One place is free, for the slot at the head.
        assert holders.started == ["a", "b", "c"]
        await holders.leave("a", "b")
        assert holders.started == ["a", "b", "c"]
        await holders.leave("c")
        assert holders.started == ["a", "b", "c", "all"]
        await holders.leave("all")
        assert holders.started[-1] == "later"
        await holders.leave_all()


@pytest.mark.parametrize("oversize", ["reject", "alone"])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_running": 4}, "max_running"),
        ({"places": 4}, "places"),
        ({"places": 4, "max_running": 9}, "places"),
        ({"places": 9, "max_running": 4}, "max_running"),
    ],
)
@virtual
async def test_more_records_than_can_run_together_are_refused_at_once(
    options: dict[str, int], what: str, oversize: str
) -> None:
    async with continuous_batcher(1_000, **options, oversize=oversize) as batcher:
        with pytest.raises(Oversize, match=rf"^5 records must run together, at most {what}=4 can$"):
            async with batcher.slot(1, records=5):
                raise AssertionError("it must not start")
        assert batcher.stats.total_rejected == 5
        async with batcher.slot(1, records=4):
            assert batcher.stats.running == 4


@virtual
async def test_the_records_of_a_slot_that_comes_too_late_are_counted() -> None:
    async with continuous_batcher() as batcher:
        with pytest.raises(Expired):
            batcher.slot(1, records=8, timeout=0.0)
        assert batcher.stats.total_rejected == 8


def test_the_error_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(Oversize(5, 4, "places")))
    assert (error.cost, error.limit, error.what) == (5, 4, "places")
    assert "at most places=4" in str(error)


@virtual
async def test_a_window_that_shrinks_refuses_what_no_longer_fits_into_it() -> None:
    async with continuous_batcher(1_000, max_running=4, oversize="alone", max_queue_size=3) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs", 1, records=4)
        await holders.enter("waits", 1, records=3)
        await holders.enter("outside", 1, records=3, wait=True)
        await holders.enter("fits", 1, records=2, wait=True)
        batcher.set_capacity(1_000, max_running=2)
        await blocked()
        for name in ("waits", "outside"):
            with pytest.raises(Oversize, match="max_running=2"):
                await holders.tasks[name]
        await holders.leave("runs")
        assert holders.started == ["runs", "fits"]
        await holders.leave_all()
        stats = batcher.stats
        assert (stats.total_failed, stats.total_rejected, stats.total_completed) == (3, 3, 6)


@pytest.mark.parametrize("records", [0, -1, 1.5, "2", None, True, 10**400, float("nan")])
@virtual
async def test_a_bad_number_of_records_is_refused_by_name(records: Any) -> None:
    async def work(record: int) -> int:
        return record

    async with continuous_batcher(1_000) as batcher:
        with pytest.raises((TypeError, ValueError), match=r"^records must be a whole number"):
            batcher.slot(1, records=records)
        with pytest.raises((TypeError, ValueError), match=r"^records must be a whole number"):
            batcher.slot(prompt_tokens=1, max_tokens=1, records=records)
        with pytest.raises((TypeError, ValueError), match=r"^records must be a whole number"):
            await batcher.submit(work, 1, 1, records=records)
        with pytest.raises((TypeError, ValueError), match=r"^records must be a whole number"):
            Entry("x", 1, records=records)
        assert batcher.stats.total_submitted == 0


@virtual
async def test_the_bound_of_the_queue_counts_records() -> None:
    async with continuous_batcher(1_000, max_running=2, max_queue_size=10) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs", 1, records=2)
        for name in "abcd":
            await holders.enter(name, 1, records=2)
        # Eight wait, four fifths of the bound; a ninth and tenth of the one tenant there is may come.
        await holders.enter("e", 1, records=2)
        assert batcher.stats.queue_depth == 10
        with pytest.raises(QueueFull, match="max_queue_size=10"):
            batcher.slot_nowait(1)
        await holders.enter("outside", 1, records=2, wait=True)
        assert (batcher.stats.outside, batcher.stats.queue_classes) == (2, {0: (10, 5)})
        await holders.leave("runs")
        # One slot started: its two places in the queue are free for the one outside.
        assert (batcher.stats.outside, batcher.stats.queue_depth) == (0, 10)
        await holders.leave_all()


def test_the_share_of_a_tenant_counts_records() -> None:
    queue = queue_of(max_size=20)
    queue.add(Entry(0, 1, tenant="neighbour", records=9))
    queue.add(Entry(1, 1, tenant="wide", records=7))
    # The 16 places for all are taken; a half of the 20 is the share of each.
    with pytest.raises(QueueFull):
        queue.add(Entry(2, 1, tenant="wide", records=4))
    queue.add(Entry(3, 1, tenant="wide", records=3))
    queue.add(Entry(4, 1, tenant="neighbour"))
    assert queue.size == 20


@virtual
async def test_the_books_count_records() -> None:
    async with continuous_batcher(1_000, max_running=4) as batcher:
        observations = batcher.observe()
        holders = Holders(batcher)
        await holders.enter("completes", 10, records=3)
        await holders.enter("expires", 1, records=2, timeout=1.0)
        await holders.enter("cancelled", 1, records=4)
        await asyncio.sleep(2.0)
        with pytest.raises(Expired):
            await holders.tasks["expires"]
        holders.tasks["cancelled"].cancel()
        await holders.leave_all()
        stats = batcher.stats
        assert (stats.total_submitted, stats.total_completed) == (9, 3)
        assert (stats.total_expired, stats.total_cancelled) == (2, 4)
        assert stats.avg_latency_s == stats.avg_run_s == pytest.approx(2.0, rel=0.01)
        assert [record.cost for record in observations.records] == [3, 3, 4]
        with pytest.raises(RuntimeError):
            async with batcher.slot(1, records=2):
                raise RuntimeError
        assert batcher.stats.total_failed == 2
    with pytest.raises(Closed):
        async with batcher.slot(1, records=3):
            pass
    assert batcher.stats.total_rejected == 3


@virtual
async def test_a_submit_may_stand_for_several_records() -> None:
    async def work(record: int) -> int:
        await asyncio.sleep(1.0)
        return record

    async with continuous_batcher(1_000, max_running=4) as batcher:
        first = await batcher.submit(work, 1, 1, records=3)
        second = await batcher.submit(work, 2, 1, records=3)
        await blocked()
        assert (batcher.stats.running, batcher.stats.queue_depth) == (3, 3)
        second.cancel()
        assert await first == 1
        assert batcher.stats.total_cancelled == 3


@virtual
async def test_the_estimate_of_a_wait_counts_records() -> None:
    async with continuous_batcher(1_000, max_running=4) as batcher:
        for _ in range(20):
            async with batcher.slot(1, records=4):
                await asyncio.sleep(1.0)
        holders = Holders(batcher)
        await holders.enter("runs", 1, records=3)
        assert batcher.estimate_wait(1) == 0.0
        assert batcher.estimate_wait(1, records=2) == pytest.approx(1 / 3)
        await holders.enter("waits", 1, records=3)
        assert batcher.estimate_wait(1) == pytest.approx(1.0)
        await holders.leave_all()


@virtual
async def test_outputs_are_learned_per_record() -> None:
    async with continuous_batcher(1_000, policy="max_utilization") as batcher:
        for _ in range(400):
            async with batcher.slot(prompt_tokens=1, max_tokens=400, records=4) as slot:
                slot.report(40)
        assert batcher.slot(prompt_tokens=1, max_tokens=100).cost == pytest.approx(1 + 10, abs=1)
        assert batcher.slot(prompt_tokens=1, max_tokens=400, records=4).cost == pytest.approx(1 + 40, abs=4)
        async with batcher.slot(prompt_tokens=1, max_tokens=400, records=4) as slot:
            slot.report(79)
            # Each has 19, beyond all that was seen.
            assert slot.cost == 1 + 400
