"""ContinuousBatcher: who starts when, and that every slot comes back exactly once."""

import asyncio
import gc
import random

import pytest

from batcher import Aborted, Closed, ContinuousBatcher, Expired, Oversize, QueueFull
from tests.batcher.helpers import Holders, check_empty, continuous_batcher
from tests.batcher.virtual import blocked, now, until, virtual


@virtual
async def test_records_start_while_their_cost_fits() -> None:
    async with continuous_batcher(100) as batcher:
        holders = Holders(batcher)
        await holders.enter("a", 60)
        await holders.enter("b", 40)
        await holders.enter("c", 1)
        assert holders.inside == ["a", "b"]
        assert (batcher.stats.running_cost, batcher.stats.queue_cost) == (100, 1)
        await holders.leave("b")
        assert holders.inside == ["a", "c"]
        await holders.leave("a", "c")
        check_empty(batcher)


@virtual
async def test_a_small_record_does_not_pass_a_large_one_that_waits() -> None:
    async with continuous_batcher(100) as batcher:
        holders = Holders(batcher)
        await holders.enter("a", 60)
        await holders.enter("B", 80)
        await holders.enter("c", 10)
        assert holders.inside == ["a"]
        await holders.leave("a")
        assert holders.inside == ["B", "c"]
        await holders.leave("B", "c")


@virtual
async def test_an_oversize_record_is_refused() -> None:
    async with continuous_batcher(100) as batcher:
        with pytest.raises(Oversize, match="costs 101, at most 100"):
            async with batcher.slot(101):
                pass
        assert batcher.stats.total_rejected == 1


@virtual
async def test_an_oversize_record_may_run_alone() -> None:
    async with continuous_batcher(100, oversize="alone") as batcher:
        holders = Holders(batcher)
        await holders.enter("a", 10)
        await holders.enter("B", 500)
        await holders.enter("c", 10)
        assert holders.inside == ["a"]
        await holders.leave("a")
        assert holders.inside == ["B"]
        await holders.leave("B")
        assert holders.inside == ["c"]
        await holders.leave("c")


# Bounds


@virtual
async def test_those_who_are_refused_are_told_to_come_back_one_after_the_other() -> None:
    async with continuous_batcher(10, max_queue_size=1) as batcher:
        for _ in range(20):
            async with batcher.slot(10):
                await asyncio.sleep(2.0)
        holders = Holders(batcher)
        await holders.enter("a")
        await holders.enter("b")
        waits = []
        for _ in range(100):
            with pytest.raises(QueueFull) as caught:
                batcher.slot_nowait(10)
            waits.append(caught.value.retry_after_s)
        # A place each 2 s, of which a third is for those that come back; and up to a quarter at random.
        for wait, least in zip(waits, (4.0, 10.0, 16.0), strict=False):
            assert 0.99 * least <= wait <= 1.26 * least
        # Not for ever: the others may have given up.
        assert 60.0 <= waits[-1] <= 75.0
        with pytest.raises(QueueFull) as caught:
            batcher.slot_nowait(10, priority=-1)
        assert caught.value.retry_after_s < 5.0
        await holders.leave("a", "b")


@virtual
async def test_an_estimate_knows_that_tenants_have_turns() -> None:
    async with continuous_batcher(10) as batcher:
        for _ in range(20):
            async with batcher.slot(10):
                await asyncio.sleep(1.0)
        holders = Holders(batcher)
        for number in range(21):
            await holders.enter(f"heavy {number}", tenant="heavy")
        assert batcher.estimate_wait(10, tenant="heavy") == pytest.approx(21.0, rel=0.01)
        assert batcher.estimate_wait(10, tenant="light") == pytest.approx(2.0, rel=0.01)
        assert batcher.estimate_wait(10, priority=-1, tenant="heavy") == pytest.approx(1.0, rel=0.01)
        await batcher.stop(drain=False, timeout=0)


# Deadlines


@virtual
async def test_who_can_not_start_in_time_is_refused_at_once() -> None:
    async with continuous_batcher(10) as batcher:
        for _ in range(20):
            async with batcher.slot(10):
                await asyncio.sleep(1.0)
        holders = Holders(batcher)
        for number in range(11):
            await holders.enter(f"heavy {number}", tenant="heavy")
        before = now()
        with pytest.raises(Expired, match=r"could not start for about 11.0 s"):
            await batcher.slot(10, deadline=now() + 5, tenant="heavy").__aenter__()
        assert now() == before
        assert batcher.stats.total_rejected == 1
        # It may be wrong, so what is near is tried; and another tenant has its own turn.
        await holders.enter("near", deadline=now() + 6, tenant="heavy")
        await holders.enter("light", deadline=now() + 5, tenant="light")
        assert batcher.stats.queue_depth == 12
        await batcher.stop(drain=False, timeout=0)


@virtual
async def test_an_expired_record_makes_way_for_the_next() -> None:
    async with continuous_batcher(100) as batcher:
        holders = Holders(batcher)
        await holders.enter("a", 60)
        await holders.enter("B", 90, deadline=now() + 1)
        await holders.enter("c", 30)
        assert holders.inside == ["a"]
        await asyncio.sleep(1.1)
        assert holders.inside == ["a", "c"]
        assert isinstance(holders.tasks["B"].exception(), Expired)
        await holders.leave("a", "c")


# Cancellation


@virtual
async def test_a_grant_that_meets_a_cancel_is_not_lost() -> None:
    async with continuous_batcher(10) as batcher:
        holders = Holders(batcher)
        await holders.enter_all("abc")
        # In one step of the loop: b is granted its slot, then its task is cancelled before it runs.
        holders._exits["a"].set()
        await until(lambda: batcher.stats.queue_depth == 1)
        assert "b" not in holders.inside
        await holders.cancel("b")
        assert holders.inside == ["c"]
        await holders.leave("c")
        check_empty(batcher)


@virtual
async def test_a_cancel_that_meets_a_grant_is_passed_over() -> None:
    async with continuous_batcher(10) as batcher:
        holders = Holders(batcher)
        slot = batcher.slot(10)
        await slot.__aenter__()
        await holders.enter_all("bc")
        # b's task is cancelled but has not run yet when the slot becomes free.
        holders.tasks["b"].cancel()
        slot.release()
        await blocked()
        assert holders.inside == ["c"]
        await holders.leave("c")
        assert batcher.stats.total_cancelled == 1
        check_empty(batcher)


@virtual
async def test_who_is_cancelled_outside_is_passed_over() -> None:
    async with continuous_batcher(10, max_queue_size=1) as batcher:
        holders = Holders(batcher)
        slot = batcher.slot(10)
        await slot.__aenter__()
        for name in "bcd":
            await holders.enter(name, wait=True)
        # c waits for space; its task is cancelled but has not run yet when there is space.
        holders.tasks["c"].cancel()
        slot.release()
        await blocked()
        await holders.leave("b", "d")
        assert holders.order == "bd"
        check_empty(batcher)


@virtual
async def test_a_slot_is_released_once() -> None:
    async with continuous_batcher(10) as batcher:
        async with batcher.slot(10) as slot:
            slot.release()
            assert batcher.stats.running == 0
            async with batcher.slot(10):
                slot.release()
                assert batcher.stats.running == 1
        check_empty(batcher)


@virtual
async def test_a_slot_that_is_released_while_it_waits_ends_the_wait() -> None:
    async with continuous_batcher(10) as batcher:
        holders = Holders(batcher)
        await holders.enter("a")
        slot = batcher.slot(10)
        waiting = asyncio.create_task(slot.__aenter__())
        await blocked()
        slot.release()
        await blocked()
        assert isinstance(waiting.exception(), Aborted)
        await holders.leave("a")
        check_empty(batcher)


@virtual
async def test_a_slot_is_entered_once() -> None:
    async with continuous_batcher(10) as batcher:
        slot = batcher.slot(10)
        async with slot:
            pass
        with pytest.raises(RuntimeError, match="once"):
            await slot.__aenter__()


# Life


# Capacity


@virtual
async def test_capacity_can_grow_while_it_runs() -> None:
    async with continuous_batcher(10, max_running=1) as batcher:
        holders = Holders(batcher)
        await holders.enter_all("abc")
        assert holders.inside == ["a"]
        batcher.set_capacity(30, max_running=2)
        await blocked()
        assert holders.inside == ["a", "b"]
        batcher.set_capacity(40)
        await blocked()
        assert holders.inside == ["a", "b"]
        batcher.set_capacity(30, max_running=None)
        await blocked()
        assert holders.inside == ["a", "b", "c"]
        await holders.leave(*"abc")


@virtual
async def test_the_queue_can_become_longer_and_shorter_while_it_runs() -> None:
    async with continuous_batcher(10, max_running=1, max_queue_size=1) as batcher:
        holders = Holders(batcher)
        await holders.enter_all("ab")
        with pytest.raises(QueueFull):
            batcher.slot_nowait(1)
        waiting = asyncio.create_task(batcher.slot(1).__aenter__())
        await blocked()
        assert batcher.stats.outside == 1
        # Space in the queue is given to what waits for it.
        batcher.set_queue_size(2)
        assert (batcher.stats.outside, batcher.stats.queue_depth) == (0, 2)
        batcher.set_queue_size(1)
        assert batcher.stats.queue_depth == 2
        with pytest.raises(QueueFull):
            batcher.slot_nowait(1)
        with pytest.raises(ValueError, match="max_queue_size must be"):
            batcher.set_queue_size(0)
        waiting.cancel()
        await holders.leave(*"ab")


@virtual
async def test_capacity_can_shrink_while_it_runs() -> None:
    async with continuous_batcher(30) as batcher:
        holders = Holders(batcher)
        await holders.enter_all("abc")
        await holders.enter("d")
        await holders.enter("E", 25)
        batcher.set_capacity(20)
        await blocked()
        assert isinstance(holders.tasks["E"].exception(), Oversize)
        await holders.leave("a")
        assert holders.inside == ["b", "c"]
        await holders.leave("b")
        assert holders.inside == ["c", "d"]
        await holders.leave("c", "d")
        check_empty(batcher)


@virtual
async def test_a_record_that_waits_may_run_alone_when_capacity_shrinks() -> None:
    async with continuous_batcher(30, oversize="alone") as batcher:
        holders = Holders(batcher)
        await holders.enter("a", 30)
        await holders.enter("b", 25)
        batcher.set_capacity(20)
        await holders.leave("a")
        assert holders.inside == ["b"]
        await holders.leave("b")


# Policies


@virtual
async def test_guaranteed_no_evict_reserves_all_that_may_be_produced() -> None:
    async with continuous_batcher(1000) as batcher, batcher.slot(prompt_tokens=100, max_tokens=400) as slot:
        assert slot.cost == 500
        slot.report(50)
        assert slot.cost == 500


async def finish(batcher: ContinuousBatcher, lengths: list[int], prompt: int = 10, limit: int = 1000) -> None:
    for length in lengths:
        async with batcher.slot(prompt_tokens=prompt, max_tokens=limit) as slot:
            slot.report(length)


def expected(batcher: ContinuousBatcher, limit: int = 1000, priority: int = 0) -> int:
    """Return the cost of a slot that comes now."""
    return batcher.slot(prompt_tokens=10, max_tokens=limit, priority=priority).cost


@virtual
async def test_max_utilization_learns_what_requests_produce() -> None:
    async with continuous_batcher(2000, policy="max_utilization") as batcher:
        assert expected(batcher) == 1010
        await finish(batcher, [90, 110] * 300)
        assert expected(batcher) == pytest.approx(110, abs=8)
        assert expected(batcher, limit=30) == 40
        assert batcher.stats.output_tokens == 60_000
        # What waited meanwhile doesn't wait for what was thought of it when it came.
        async with batcher.slot(1_900, priority=0):
            waits = [batcher.slot_nowait(prompt_tokens=10, max_tokens=50) for _ in range(3)]
            assert [slot.running for slot in waits] == [True, False, False]
        assert all(slot.running for slot in waits)
        for slot in waits:
            slot.release()


@virtual
async def test_max_utilization_follows_a_record_that_outgrows_its_estimate() -> None:
    async with continuous_batcher(400, policy="max_utilization", oversize="alone") as batcher:
        await finish(batcher, [100] * 450 + [300] * 50)
        holders = Holders(batcher)
        async with batcher.slot(prompt_tokens=10, max_tokens=1000) as slot:
            slot.report(1)
            assert slot.cost == pytest.approx(130, abs=15)
            slot.report(120)
            assert 310 <= slot.cost <= 400
            slot.report(350)
            assert slot.cost == batcher.stats.running_cost == 1010
            slot.report(1005)
            assert slot.cost == 1015
            await holders.enter("b", 1)
            assert holders.inside == []
        await blocked()
        assert holders.inside == ["b"]
        await holders.leave("b")
        check_empty(batcher)


@virtual
async def test_a_slot_that_nobody_reports_is_asked_while_records_wait() -> None:
    async with continuous_batcher(1_500, policy="max_utilization") as batcher:
        await finish(batcher, [100] * 450)
        holders, tokens = Holders(batcher), [0]
        async with batcher.slot(prompt_tokens=10, max_tokens=1000) as slot:
            slot.follow(lambda: tokens[0])
            await holders.enter("waits", 1_400)
            tokens[0] = 350
            await asyncio.sleep(1)
            await holders.enter("x", 1)
            await holders.leave("waits")
            assert (slot.output_tokens, slot.cost) == (350, 1010)
        await holders.leave_all()


@virtual
async def test_what_a_cancelled_record_produced_is_no_length() -> None:
    async with continuous_batcher(2000, policy="max_utilization") as batcher:
        await finish(batcher, [100] * 400)
        before = expected(batcher)

        async def cancelled() -> None:
            async with batcher.slot(prompt_tokens=10, max_tokens=1000) as slot:
                slot.report(1)
                raise asyncio.CancelledError

        for _ in range(100):
            with pytest.raises(asyncio.CancelledError):
                await cancelled()
        await finish(batcher, [100] * 20)
        assert expected(batcher) == pytest.approx(before, abs=2)


@virtual
async def test_only_the_background_is_overcommitted_where_there_is_one() -> None:
    async with continuous_batcher(
        1_010, policy="max_utilization", background=1, priority_aging_s=5.0
    ) as batcher:
        for _ in range(400):
            async with batcher.slot(prompt_tokens=10, max_tokens=1000, priority=1) as slot:
                slot.report(100)
        assert expected(batcher) == 1010
        assert expected(batcher, priority=1) == pytest.approx(110, abs=8)
        rows = [batcher.slot_nowait(prompt_tokens=10, max_tokens=1000, priority=1) for _ in range(20)]
        assert 3 <= sum(row.running for row in rows) < 20
        # They outgrow what was thought of them, and nothing fits beside them.
        for row in rows:
            if row.running:
                row.report(900)
        async with batcher.slot(prompt_tokens=10, max_tokens=500) as live:
            assert live.cost == 510
            await asyncio.sleep(5.1)
            # It doesn't fit beside the live one with the most that it may produce.
            assert not any(row.promoted for row in rows)
            live.correct(0, 0)
            promoted = [row for row in rows if row.promoted]
            assert [row.cost for row in promoted] == [1010]
        for row in rows:
            row.release()
        check_empty(batcher)


@virtual
async def test_after_a_preemption_less_is_overcommitted() -> None:
    async with continuous_batcher(3_030, policy="max_utilization", max_queue_size=100) as batcher:
        await finish(batcher, [100] * 400)

        def started() -> int:
            slots = [batcher.slot_nowait(prompt_tokens=10, max_tokens=1000) for _ in range(50)]
            for slot in slots:
                if slot.running:
                    slot.report(1)
            running = batcher.stats.running
            for slot in reversed(slots):
                slot.release()
            return running

        assert started() > 6
        async with batcher.slot(0):
            batcher.overcommitted(1)
        assert started() == 3
        await asyncio.sleep(1_000)
        assert started() > 6
        with pytest.raises(ValueError, match="records must be a whole number >= 1, not 0"):
            batcher.overcommitted(0)


@virtual
async def test_a_tenant_is_charged_for_what_it_used() -> None:
    async with continuous_batcher(100, max_queue_size=100) as batcher:
        holders = Holders(batcher)
        await holders.enter("x", 100)

        # a reserves ten times what it uses, b uses what it reserves.
        async def use(tenant: str, produced: int) -> None:
            async with batcher.slot(prompt_tokens=0, max_tokens=100, tenant=tenant) as slot:
                holders.started.append(tenant)
                await asyncio.sleep(1)
                slot.report(produced)

        tasks = [asyncio.create_task(use("a", 10)) for _ in range(30)]
        tasks += [asyncio.create_task(use("b", 100)) for _ in range(30)]
        await blocked()
        await holders.leave("x")
        await asyncio.wait(tasks)
        assert holders.order[1:23].count("a") == 20


# Submit


@virtual
async def test_cancelling_what_was_submitted_frees_its_place() -> None:
    async with continuous_batcher(10) as batcher:
        ran = []

        async def hold(record: str) -> None:
            ran.append(record)
            await asyncio.sleep(100)

        running = await batcher.submit(hold, "running", 10)
        waiting = await batcher.submit(hold, "waiting", 10)
        unstarted = await batcher.submit(hold, "unstarted", 10)
        unstarted.cancel()
        await blocked()
        waiting.cancel()
        await blocked()
        running.cancel()
        await blocked()
        assert ran == ["running"]
        assert batcher.stats.total_cancelled == 3
        check_empty(batcher)


@virtual
async def test_a_submit_that_is_cancelled_leaves_no_error_behind() -> None:
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    async with continuous_batcher(10, max_queue_size=1) as batcher:

        async def hold(_: str) -> None:
            await asyncio.sleep(1)

        await batcher.submit(hold, "running", 10)
        unstarted = await batcher.submit(hold, "unstarted", 10)
        outside = asyncio.create_task(batcher.submit(hold, "outside", 10))
        await asyncio.sleep(0)
        unstarted.cancel()
        outside.cancel()
        await asyncio.wait([unstarted, outside])
        del unstarted, outside
    gc.collect()
    assert not reports
    check_empty(batcher)


@virtual
async def test_a_stop_reports_no_error_for_what_it_refuses_and_others_are_still_reported() -> None:
    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reports.append(repr(context["exception"]))
    )
    batcher = continuous_batcher(10)
    await batcher.start()

    async def fail(number: int) -> None:
        await asyncio.sleep(1)
        raise ValueError(number)

    for number in range(4):
        await batcher.submit(fail, number, 10)
    await batcher.stop(drain=False)
    await asyncio.sleep(1)
    gc.collect()
    assert reports == ["ValueError(0)"]


@virtual
@pytest.mark.parametrize("turns", range(6))
async def test_nothing_runs_after_a_stop_that_gives_up(turns: int) -> None:
    batcher = continuous_batcher(1, max_queue_size=1)
    await batcher.start()
    gate, log = asyncio.Event(), []

    async def work(record: str) -> None:
        log.append(f"{record} begins")
        await asyncio.sleep(1)
        log.append(f"{record} ends")

    async def hold() -> None:
        async with batcher.slot(1):
            await gate.wait()

    async def open_gate() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        gate.set()

    tasks: list[asyncio.Task[object]] = [asyncio.create_task(hold())]
    await asyncio.sleep(0)
    await batcher.submit(work, "fills the queue", 1, priority=5)
    tasks += [asyncio.create_task(batcher.submit(work, "waits outside", 1))]
    await asyncio.sleep(0)
    assert batcher.stats.outside == 1
    tasks += [asyncio.create_task(open_gate())]
    await batcher.stop(timeout=0)
    before = list(log)
    await asyncio.wait(tasks)
    await asyncio.sleep(2)
    assert log == before


def test_a_slot_that_waits_may_be_released_after_its_loop_was_closed() -> None:
    batcher = ContinuousBatcher(capacity=10)
    loop = asyncio.new_event_loop()
    waits = batcher.slot(10)

    async def life() -> None:
        await batcher.start()
        await batcher.slot(10).__aenter__()
        loop.waits = asyncio.create_task(waits.__aenter__())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    loop.run_until_complete(life())
    assert batcher.load.waiting == 1
    loop.close()
    waits.release()
    assert (batcher.load.running, batcher.load.waiting) == (1, 0)
    assert batcher.stats.total_cancelled == 1


# Estimates and statistics


@virtual
async def test_a_slot_that_may_start_at_once_is_not_refused_for_its_deadline() -> None:
    async with continuous_batcher(100, oversize="alone") as batcher:
        for _ in range(40):
            async with batcher.slot(10):
                await asyncio.sleep(0.001)
        async with batcher.slot(200, timeout=0.3) as slot:
            assert slot.waited_s == 0


@virtual
async def test_a_first_token_of_a_slot_that_does_not_run_is_not_counted() -> None:
    async with continuous_batcher(10) as batcher:
        async with batcher.slot(10) as slot:
            waits = batcher.slot(10)
            waiting = asyncio.create_task(waits.__aenter__())
            await asyncio.sleep(1)
            waits.first_token()
        slot.first_token()
        await waiting
        before = batcher.stats.ttft_p50_s
        waits.first_token()
        assert (before, batcher.stats.ttft_p50_s) == (None, 1)
        waits.release()


@virtual
async def test_the_estimated_wait_is_within_a_factor_of_two_under_steady_load() -> None:
    rng = random.Random(5)
    ratios = []
    async with continuous_batcher(1000, max_running=64, max_queue_size=10_000) as batcher:

        async def use() -> None:
            cost = min(900, int(rng.lognormvariate(3.5, 0.8)) + 1)
            estimate = batcher.estimate_wait(cost)
            async with batcher.slot(cost) as slot:
                if estimate > 0.2:
                    ratios.append(slot.waited_s / estimate)
                await asyncio.sleep(cost * 0.005 * rng.uniform(0.7, 1.3))

        # A queue that is never empty: the load is steady, a little above what can be served at first.
        tasks = [asyncio.create_task(use()) for _ in range(60)]
        for _ in range(3000):
            tasks.append(asyncio.create_task(use()))
            await asyncio.sleep(rng.expovariate(120 if batcher.stats.queue_depth < 40 else 60))
        await asyncio.wait(tasks)
    assert len(ratios) > 1000
    ranked = sorted(ratios)
    assert ranked[len(ranked) // 20] > 0.5
    assert ranked[-len(ranked) // 20] < 2.0


@virtual
async def test_the_estimate_counts_only_what_goes_first() -> None:
    async with continuous_batcher(10) as batcher:
        assert batcher.estimate_wait(10) == 0.0
        async with batcher.slot(10):
            assert batcher.estimate_wait(10) == 1.0
            await asyncio.sleep(4)
        holders = Holders(batcher)
        await holders.enter("a")
        await holders.enter("b")
        await holders.enter("c", priority=5)
        assert batcher.estimate_wait(10) == pytest.approx(8, rel=0.01)
        assert batcher.estimate_wait(10, priority=-1) == pytest.approx(4, rel=0.01)
        assert batcher.estimate_wait(10, priority=5) == pytest.approx(12, rel=0.01)
        await holders.leave(*"abc")


@virtual
async def test_statistics_are_true_in_the_middle() -> None:
    async with continuous_batcher(100) as batcher:
        await asyncio.sleep(1)
        async with batcher.slot(50):
            await asyncio.sleep(3)
            stats = batcher.stats
            assert (stats.busy_time_s, stats.idle_time_s) == pytest.approx((3, 1))
            assert stats.utilization == pytest.approx(0.75)
            assert stats.occupancy == pytest.approx(0.375)
            assert (stats.total_submitted, stats.running, stats.running_cost) == (1, 1, 50)
        async with batcher.slot(50):
            await asyncio.sleep(1)
    await asyncio.sleep(50)
    stats = batcher.stats
    assert (stats.busy_time_s, stats.idle_time_s) == pytest.approx((4, 1))
    assert stats.throughput == pytest.approx(0.4)
    assert stats.cost_throughput == pytest.approx(20)
    assert stats.avg_latency_s == pytest.approx(2)
    assert stats.run_p99_s == pytest.approx(3)
    assert stats.occupancy == pytest.approx(0.4)
    with pytest.raises(AttributeError):
        stats.running = 5  # type: ignore[misc]


# Arguments


@virtual
async def test_wrong_costs_are_refused() -> None:
    async with continuous_batcher() as batcher:
        with pytest.raises(ValueError, match="cost must be a finite number >= 0, not -1"):
            batcher.slot(-1)
        with pytest.raises(ValueError, match="give either cost"):
            batcher.slot()
        with pytest.raises(ValueError, match="give either cost"):
            batcher.slot(5, prompt_tokens=1, max_tokens=1)
        with pytest.raises(ValueError, match="give either cost"):
            batcher.slot(prompt_tokens=1)
        with pytest.raises(ValueError, match="max_tokens must be"):
            batcher.slot(prompt_tokens=1, max_tokens=-1)
        assert batcher.slot(0).cost == 0
        with pytest.raises(ValueError, match="timeout must be a finite number of seconds >= 0, not -1"):
            await batcher.stop(timeout=-1)


@virtual
async def test_a_pause_starts_nothing_and_lets_what_runs_end() -> None:
    async with continuous_batcher(100) as batcher:
        holders = Holders(batcher)
        await holders.enter("a")
        batcher.pause()
        await holders.enter("b")
        assert batcher.load == (1, 1, 10, 0, None)
        await holders.leave("a")
        assert (holders.inside, batcher.stats.queue_depth) == ([], 1)
        await holders.enter("c", priority=-1)
        assert batcher.load == (0, 2, 20, -1, None)
        batcher.resume()
        await blocked()
        assert holders.order == "acb"
        await holders.leave("b", "c")
        check_empty(batcher)


@virtual
async def test_the_load_tells_the_most_urgent_tier_also_of_those_that_wait_for_space() -> None:
    async with continuous_batcher(10, max_queue_size=1) as batcher:
        holders = Holders(batcher)
        await holders.enter_all("ab")
        await holders.enter("urgent", priority=-1, wait=True)
        assert batcher.stats.outside == 1
        assert batcher.load == (1, 2, 20, -1, None)
        await holders.leave_all()
        assert batcher.load == (0, 0, 0, 0, None)


@virtual
async def test_the_estimate_of_a_wait_contains_the_pause_and_what_ran_before_it() -> None:
    async with continuous_batcher(10) as batcher:
        holders = Holders(batcher)
        for name in "abcd":
            await holders.enter(name)
            await asyncio.sleep(2.0)
            await holders.leave(name)
        await holders.enter("e")
        batcher.pause(30.0)
        await holders.leave("e")
        assert batcher.estimate_wait(10) == pytest.approx(30.0)
        await asyncio.sleep(10.0)
        assert batcher.estimate_wait(10) == pytest.approx(20.0)
        await holders.enter("f")
        await holders.enter("g")
        # One of the two starts with the end of the pause; a mean record takes a bit below 2 s.
        assert 21.0 < batcher.estimate_wait(10) < 24.0
        batcher.pause(5.0)
        assert batcher.estimate_wait(10) < 9.0
        batcher.resume()
        await blocked()
        await holders.leave("f", "g")


@pytest.mark.parametrize(
    ("pause_s", "passed_s", "least_s"),
    [pytest.param(40.0, 0.0, 40.0, id="its end"), pytest.param(2.0, 5.0, 1.0, id="no end: not at once")],
)
@virtual
async def test_a_refusal_in_a_pause_says_when_to_come_back(
    pause_s: float, passed_s: float, least_s: float
) -> None:
    async with continuous_batcher(10, max_queue_size=1) as batcher:
        batcher.pause(pause_s)
        await asyncio.sleep(passed_s)
        holders = Holders(batcher)
        await holders.enter("a")
        with pytest.raises(QueueFull) as refusal:
            batcher.slot_nowait(10)
        assert refusal.value.retry_after_s >= least_s
        batcher.resume()
        await blocked()
        await holders.leave("a")


@virtual
async def test_a_deadline_passes_in_a_pause() -> None:
    async with continuous_batcher(10) as batcher:
        batcher.pause(40.0)
        began = now()
        task = asyncio.create_task(batcher.slot(10, timeout=3.0).__aenter__())
        await blocked()
        assert batcher.load.deadline == began + 3.0
        with pytest.raises(Expired):
            await task
        assert now() == pytest.approx(began + 3.0)


@virtual
async def test_a_stop_in_a_pause_refuses_what_waits() -> None:
    batcher = continuous_batcher(10)
    await batcher.start()
    batcher.pause()
    task = asyncio.create_task(batcher.slot(10).__aenter__())
    await blocked()
    await batcher.stop()
    with pytest.raises(Closed):
        await task


@virtual
async def test_a_pause_in_a_stop_refuses_what_waits() -> None:
    batcher = continuous_batcher(10)
    await batcher.start()
    running = batcher.slot(10)
    await running.__aenter__()
    waiting = asyncio.create_task(batcher.slot(10).__aenter__())
    await blocked()
    stop = asyncio.create_task(batcher.stop())
    await blocked()
    assert not waiting.done()
    batcher.pause()
    with pytest.raises(Closed):
        await waiting
    assert not stop.done()
    running.release()
    await stop
