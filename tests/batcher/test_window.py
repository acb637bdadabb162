"""The window: the rate of service by Little's law, and the standby that keeps all places filled."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher import ContinuousBatcher
from batcher.window import MEMORY, ServiceRate
from tests.batcher.helpers import Holders, check_empty, continuous_batcher
from tests.batcher.virtual import virtual


def test_nothing_is_known_before_the_first_record() -> None:
    rate = ServiceRate()
    assert rate.time_to_serve(1, 1, 1, 1) is None
    rate.learn(5, 2.0)
    assert rate.time_to_serve(1, 5, 0, 0) is None


def test_records_and_cost_bound_the_rate() -> None:
    rate = ServiceRate()
    for _ in range(100):
        rate.learn(10, 2.0)
    # Four records of cost 10 inside, two seconds each: two records, or a cost of 20, in a second.
    assert rate.time_to_serve(6, 10, 4, 40) == pytest.approx(3.0)
    assert rate.time_to_serve(1, 80, 4, 40) == pytest.approx(4.0)
    assert rate.time_to_serve(0, -5, 4, 40) == 0.0


def test_the_mean_time_is_taken_by_cost() -> None:
    rate = ServiceRate()
    for _ in range(500):
        rate.learn(1, 1.0)
        rate.learn(99, 10.0)
    assert rate.time_to_serve(0, 100, 1, 100) == pytest.approx((1 + 990) / 100, rel=0.01)


def test_free_records_have_a_rate_too() -> None:
    rate = ServiceRate()
    rate.learn(0, 3.0)
    assert rate.time_to_serve(2, 0, 1, 0) == pytest.approx(6.0)


def test_the_past_fades() -> None:
    rate = ServiceRate()
    for _ in range(2000):
        rate.learn(1, 1.0)
    for _ in range(round(3 / (1 - MEMORY))):
        rate.learn(1, 9.0)
    assert rate.time_to_serve(1, 1, 1, 1) == pytest.approx(9.0, rel=0.1)


# Standby

PLACES = 16
TOKENS = 4
RECORDS = 400


class StepEngine:
    """Makes one token for up to 16 records per step.

    A record that comes during a step is in the next one but one.

    Attributes:
        steps: Steps so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._coming: list[asyncio.Event] = []
        self._waiting: list[asyncio.Event] = []
        self._running: dict[asyncio.Event, int] = {}

    async def generate(self) -> None:
        """Return when one record has all its tokens."""
        done = asyncio.Event()
        self._coming.append(done)
        await done.wait()

    async def run(self) -> None:
        while True:
            free = PLACES - len(self._running)
            self._running |= dict.fromkeys(self._waiting[:free], TOKENS)
            del self._waiting[:free]
            self._waiting += self._coming
            self._coming.clear()
            self.steps += 1
            await asyncio.sleep(0.01)
            for done in [*self._running]:
                self._running[done] -= 1
                if not self._running[done]:
                    del self._running[done]
                    done.set()


async def steps_for_all(**settings: int) -> int:
    """Return the steps that many records take which all wait from the start."""
    engine = StepEngine()
    running = asyncio.create_task(engine.run())
    async with continuous_batcher(10_000, **settings) as batcher:

        async def one() -> None:
            async with batcher.slot(prompt_tokens=1, max_tokens=TOKENS) as slot:
                await engine.generate()
                slot.report(TOKENS)

        await asyncio.gather(*(one() for _ in range(RECORDS)))
        check_empty(batcher)
    running.cancel()
    return engine.steps


@virtual
async def test_no_place_of_the_engine_stays_empty_while_records_wait() -> None:
    least = RECORDS * TOKENS / PLACES
    assert await steps_for_all(places=PLACES) < 1.1 * least
    # Without a standby each place is empty from the end of a record until the next one comes.
    assert await steps_for_all(places=PLACES, max_running=PLACES) > 1.3 * least


@virtual
async def test_as_many_wait_in_the_engine_as_end_within_two_steps() -> None:
    async with continuous_batcher(1_000, places=4, max_queue_size=100) as batcher:
        holders = Holders(batcher)
        await holders.enter_all("abcdef")
        # Before any has ended, one of four.
        assert holders.inside == [*"abcde"]
        stats = batcher.stats
        assert (stats.running, stats.max_running, stats.queue_depth) == (5, 4, 1)
        await holders.leave(*"abcdef")
        for _ in range(300):
            async with batcher.slot(prompt_tokens=1, max_tokens=2) as slot:
                slot.report(2)
        await holders.enter_all("ABCDEFGHI")
        # With two tokens each, four end within two steps.
        assert holders.inside == [*"ABCDEFGH"]
        await holders.leave(*"ABCDEFGHI")
        check_empty(batcher)


@virtual
async def test_a_bound_that_is_set_holds() -> None:
    async with continuous_batcher(1_000, places=4, max_running=3) as batcher:
        holders = Holders(batcher)
        await holders.enter_all("abcdef")
        assert len(holders.inside) == batcher.stats.max_running == 3
        batcher.set_capacity(1_000, max_running=None)
        await holders.leave("a")
        assert len(holders.inside) == 5
        batcher.set_capacity(20)
        await holders.leave(*"bcd")
        assert len(holders.inside) == 2
        await holders.leave(*"ef")


def test_a_number_of_places_is_checked() -> None:
    with pytest.raises(ValueError, match="places must be"):
        ContinuousBatcher(capacity=1, places=0)


async def standby(outputs: list[int]) -> int:
    """Return how many wait in the engine after records with these outputs, when there are plenty."""
    async with continuous_batcher(1_000, places=PLACES, max_queue_size=100) as batcher:
        for tokens in outputs:
            async with batcher.slot(prompt_tokens=1, max_tokens=1) as slot:
                slot.report(tokens)
        holders = Holders(batcher)
        names = [str(number) for number in range(3 * PLACES)]
        await holders.enter_all(names)
        waiting = len(holders.inside) - PLACES
        await holders.leave(*names)
        return waiting


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 100_000), min_size=1))
@virtual
async def test_the_standby_stays_between_one_and_the_places(outputs: list[int]) -> None:
    assert 1 <= await standby(outputs) <= PLACES


@virtual
async def test_the_standby_follows_the_mean_output() -> None:
    assert await standby([TOKENS] * 500) == 2 * PLACES // TOKENS
    # A record without tokens, like an embedding, takes a step.
    assert await standby([0] * 500) == PLACES
    assert await standby([1_000] * 500) == 1
