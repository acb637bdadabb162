"""What a background class may take where the foreground has goals, and what is kept from it."""

import asyncio

import pytest

from batcher import ContinuousBatcher, Goals, QueueFull, SlotOptions
from batcher.goals import Background
from tests.batcher.helpers import Holders, check_empty, continuous_batcher
from tests.batcher.virtual import blocked, now, virtual

GOALS = Goals(ttft_p99_s=0.1)
FLEX: SlotOptions = {"priority": 1}


def batcher_of(capacity: int = 1_000, **settings: object) -> ContinuousBatcher:
    settings = {"goals": GOALS, "max_running": 32, "priority_aging_s": None} | settings
    return continuous_batcher(capacity, **settings)


async def fill(holders: Holders, count: int, cost: int = 1) -> None:
    """Let so many records of the background come."""
    for number in range(count):
        await holders.enter(f"flex {number}", cost, **FLEX)


def flex(holders: Holders) -> int:
    return sum(name.startswith("flex") for name in holders.inside)


async def end(holders: Holders) -> None:
    while holders.tasks:
        names = list(holders.tasks)
        for name in names:
            holders.tasks.pop(name).cancel()
        await blocked()


async def steps(batcher: ContinuousBatcher, seconds: float, count: int) -> None:
    """Let the engine make steps of so many seconds."""
    for _ in range(count):
        await asyncio.sleep(seconds)
        batcher.step(seconds)
    await blocked()


@virtual
async def test_the_window_is_narrow_until_steps_are_known_and_widens_while_they_are_short() -> None:
    async with batcher_of(max_running=128) as batcher:
        holders = Holders(batcher)
        await fill(holders, 150)
        first = flex(holders)
        assert first == batcher.stats.background_running == batcher.stats.background_window
        await steps(batcher, 0.001, 5_000)
        # A sixteenth of the places is kept, as nobody else came.
        assert flex(holders) == 128 - 8 > first
        await end(holders)
        check_empty(batcher)


@virtual
async def test_the_window_narrows_when_steps_get_long_down_to_one() -> None:
    async with batcher_of(max_running=128) as batcher:
        holders = Holders(batcher)
        await fill(holders, 150)
        await steps(batcher, 0.001, 8_000)
        wide = flex(holders)
        await steps(batcher, 0.2, 50)
        assert batcher.stats.background_window is not None
        assert batcher.stats.background_window < wide
        assert flex(holders) == wide, "what runs goes on"
        while len(holders.inside) > 1:
            await holders.leave(*holders.inside[1:])
            await steps(batcher, 0.2, 20)
        assert batcher.stats.background_window == 1
        await end(holders)


class Served:
    """A background that always has records to start, on an engine with steps of 10 ms."""

    def __init__(self) -> None:
        self._time_s = 0.0
        self.background = Background(GOALS, 1, lambda: self._time_s)

    def run(self, seconds: float) -> int:
        """Make steps, in each of which a tenth of the records ends; return those that run then."""
        background = self.background
        for _ in range(round(seconds / 0.01)):
            self._time_s += 0.01
            background.step(0.01)
            for _ in range(background.running // 10):
                background.grow(1, -1, -1)
            while background.admits(1, 1, 10_000, 128):
                background.begin(1, 1, 1, 1)
        return background.running

    def answer(self, *seconds: float) -> None:
        for took in seconds:
            self.background.first_token(took)


@pytest.mark.parametrize("late_s", [0.11, 0.12, 0.13, 0.14, 0.16, 0.2, 0.3])
def test_late_answers_narrow_the_background_once_and_for_a_minute_at_most(late_s: float) -> None:
    """Two of 42 answers are late; no others come."""
    served = Served()
    wide = served.run(20)
    served.answer(*[0.03] * 40, *[late_s] * 2)
    for _ in range(5):
        assert wide / 4 <= served.run(10) <= wide / 2
    assert served.run(20) > 0.9 * wide
    assert served.background.stats()["expected_ttft_s"] < GOALS.ttft_p99_s


@pytest.mark.parametrize("late_s", [0.11, 0.3])
def test_one_answer_in_a_hundred_may_be_late(late_s: float) -> None:
    served = Served()
    wide = served.run(20)
    served.answer(*[0.03] * 198, *[late_s] * 2)
    assert 0.7 * wide < served.run(0.1) < wide, "it is narrowed at once, as more may be late"
    served.run(9)
    # The pace leaves a place or two empty now and then.
    assert max(served.run(0.1) for _ in range(10)) == wide


def test_the_hundredth_answer_is_counted_over_a_minute() -> None:
    """Five of 605 answers of a minute are late, all among the last ones."""
    served = Served()
    wide = served.run(20)
    for _ in range(12):
        served.answer(*[0.03] * 50)
        served.run(4)
    served.answer(*[0.3] * 5)
    assert 0.7 * wide < served.run(0.1) < wide, "it is narrowed at once, as more may be late"
    served.run(9)
    assert max(served.run(0.1) for _ in range(10)) == wide


def test_a_wide_window_is_not_judged_by_answers_beside_a_narrow_one() -> None:
    """Answers take 65 ms of 100 beside eight records, and longer beside more; they count for a minute."""
    served = Served()
    assert served.run(0.1) <= 8
    served.answer(*[0.065] * 40)
    assert 16 < served.run(30) < 64
    assert served.background.stats()["expected_ttft_s"] < GOALS.ttft_p99_s
    assert served.run(60) > 100


def test_prompts_are_spread_also_where_the_foreground_leaves_few_places() -> None:
    """With each step a tenth of the records ends: so many may start together, and few more."""
    served = Served()
    background = served.background
    assert served.run(20) == 128 - 8
    background.begin(0, 1, 32, 1)
    running = served.run(10)
    assert running == 128 - 64
    background.grow(1, -running, -running)
    assert served.run(0.01) <= 9


@virtual
async def test_goals_count_from_the_arrival_of_a_request() -> None:
    async with batcher_of() as batcher:
        await steps(batcher, 0.01, 20)
        for arrived_at in [None] * 20 + [now() - 5.0] * 20:
            before = batcher.stats.expected_ttft_s
            async with batcher.slot(1, arrived_at=arrived_at) as slot:
                slot.first_token()
            assert before is not None
            assert before < GOALS.ttft_p99_s or arrived_at is not None
        stats = batcher.stats
        assert stats.expected_ttft_s is not None
        assert stats.expected_ttft_s >= 5.0
        assert stats.ttft_p99_s == 0.0, "the statistics are of the time in the batcher and the engine"


@virtual
async def test_the_foreground_passes_a_background_that_is_held_back() -> None:
    async with batcher_of() as batcher:
        holders = Holders(batcher)
        await fill(holders, 20)
        assert batcher.stats.queue_depth == 12
        await holders.enter("chat")
        await holders.enter("urgent", priority=-1)
        assert {"chat", "urgent"} <= set(holders.inside)
        assert batcher.stats.queue_depth == 12
        await end(holders)
        check_empty(batcher)


@virtual
async def test_what_waits_starts_by_class_when_places_are_scarce() -> None:
    async with batcher_of(max_running=1) as batcher:
        holders = Holders(batcher)
        await holders.enter("first")
        await holders.enter("flex", priority=1)
        await holders.enter("chat", priority=0)
        await holders.enter("urgent", priority=-1)
        order = []
        for _ in range(4):
            order += holders.inside
            await holders.leave(*holders.inside)
        assert order == ["first", "urgent", "chat", "flex"]


@virtual
async def test_places_and_capacity_are_kept_for_twice_what_the_foreground_used() -> None:
    async with batcher_of(capacity=1_000, max_running=32) as batcher:
        holders = Holders(batcher)
        for number in range(6):
            await holders.enter(f"chat {number}", 30)
        await fill(holders, 60)
        await steps(batcher, 0.001, 3_000)
        assert flex(holders) == 32 - 12
        # 15 to 30 seconds later nothing is known of them.
        await holders.leave(*(f"chat {number}" for number in range(6)))
        await steps(batcher, 0.01, 3_500)
        assert flex(holders) == 32 - 2
        await end(holders)


def test_a_peak_of_the_foreground_is_forgotten_also_while_single_requests_come() -> None:
    time_s = 0.0
    background = Background(GOALS, 1, lambda: time_s)
    background.begin(0, 1, 20, 1)
    background.grow(0, -1, -20)
    for _ in range(4):
        time_s += 10.0
        background.begin(0, 1, 1, 1)
        background.grow(0, -1, -1)
    assert background.places(1_000, 8)[0] == 8 - 2


@virtual
async def test_a_large_record_of_the_background_leaves_capacity_for_the_others() -> None:
    async with batcher_of(capacity=160) as batcher:
        holders = Holders(batcher)
        await fill(holders, 1, cost=140)
        await holders.enter("flex 1", 11, **FLEX)
        # A sixteenth is kept.
        assert flex(holders) == 1
        await holders.enter("chat", 20)
        assert "chat" in holders.inside
        await end(holders)
        # Alone it may take all there is.
        await holders.enter("flex", 160, **FLEX)
        assert flex(holders) == 1
        await end(holders)


@virtual
async def test_prompts_of_the_background_are_spread_over_the_steps() -> None:
    async with batcher_of(capacity=100_000, max_running=64) as batcher:
        holders = Holders(batcher)
        await fill(holders, 100, cost=100)
        await steps(batcher, 0.001, 8_000)
        inside = list(holders.inside)
        assert len(inside) >= 32
        await holders.leave(*inside)
        # All left in one step: the next ones come one after the other, and all come.
        assert flex(holders) < len(inside) / 4
        await steps(batcher, 0.001, 8_000)
        assert flex(holders) == 100 - len(inside)
        await end(holders)


@virtual
async def test_the_background_finds_the_queue_full_before_the_others_do() -> None:
    async with batcher_of(max_running=1, max_queue_size=10) as batcher:
        holders = Holders(batcher)
        await fill(holders, 10)
        with pytest.raises(QueueFull):
            batcher.slot_nowait(1, priority=1)
        await holders.enter("chat")
        assert batcher.stats.queue_depth == 10
        with pytest.raises(QueueFull):
            batcher.slot_nowait(1)
        await end(holders)


@virtual
async def test_the_foreground_does_not_stand_behind_the_background_that_waits_for_space() -> None:
    async with batcher_of(max_running=1, max_queue_size=10) as batcher:
        holders = Holders(batcher)
        for number in range(20):
            await holders.enter(f"flex {number}", priority=1, wait=True)
        assert batcher.stats.outside == 10
        await holders.enter("chat")
        assert batcher.stats.outside == 10
        await holders.leave("flex 0")
        assert holders.inside == ["chat"]
        await end(holders)
        check_empty(batcher)


@virtual
async def test_an_estimate_for_the_background_counts_its_own_window() -> None:
    async with batcher_of(max_running=64) as batcher:
        for _ in range(5):
            async with batcher.slot(1, priority=1):
                await asyncio.sleep(2.0)
        holders = Holders(batcher)
        await fill(holders, 16)
        assert batcher.estimate_wait(1) == 0
        # Eight run and take 2 s each; eight wait, and one more.
        assert batcher.estimate_wait(1, priority=1) == pytest.approx(9 * 2.0 / 8)
        await end(holders)


@virtual
async def test_without_goals_all_classes_share_the_window() -> None:
    async with batcher_of(goals=None) as batcher:
        holders = Holders(batcher)
        await fill(holders, 40)
        assert flex(holders) == 32
        assert batcher.stats.background_window is None
        batcher.step(1.0)
        await end(holders)


@pytest.mark.parametrize("late_s", [0.11, 0.15, 5.0])
def test_a_minute_after_mostly_late_answers_the_background_has_its_width_again(late_s: float) -> None:
    """The foreground was overloaded, and has gone."""
    served = Served()
    wide = served.run(20)
    served.answer(*[0.03] * 10, *[late_s] * 40)
    assert served.run(30) < wide / 2
    served.run(60)
    assert max(served.run(0.1) for _ in range(10)) == wide
    assert served.background.stats()["expected_ttft_s"] < GOALS.ttft_p99_s


def test_a_minute_after_slow_answers_the_background_has_its_width_again() -> None:
    """Two of 40 answers had 200 ms per token; no others come."""
    served = Served()
    served.background.goals = Goals(ttft_p99_s=0.1, tpot_p99_s=0.05)
    wide = served.run(20)
    for took in [0.01] * 38 + [0.2] * 2:
        served.background.answered(took)
    assert served.run(30) < wide / 2
    served.run(60)
    assert max(served.run(0.1) for _ in range(10)) == wide
