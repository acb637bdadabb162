"""The window: the standby that keeps all places filled."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import ContinuousBatcher
from tests.batcher.helpers import Holders, check_empty, continuous_batcher
from tests.batcher.virtual import virtual

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
