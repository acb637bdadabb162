"""Which row is next."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from serve_app.jobs.batches import OpenBatch
from serve_app.jobs.models import STATES, State
from serve_app.jobs.pacing import Fixed
from serve_app.jobs.rows import Row
from serve_app.jobs.scheduler import FILL_ROWS, Places, Shares
from tests.progress import STILL_S
from tests.serve_app.jobs.helpers import batch_of

LIMIT_S = STILL_S
TEXT = b"x" * 10


class Site:
    """Places, and the rows that have been taken.

    Attributes:
        places: The places under test.
        taken: The batch and the row of each.
        calls: How often the places told of a change.
    """

    def __init__(self, limit: int = 4, max_bytes: int = 1 << 20) -> None:
        self.calls = 0
        self.places = Places(Fixed(limit), max_bytes, self._changed)
        self.taken: list[tuple[OpenBatch, Row]] = []

    def _changed(self) -> None:
        self.calls += 1

    def fill(self, *batches: OpenBatch) -> list[str]:
        """Give the free places, and return the tenants of the rows that were taken."""
        found = list(self.places.fill([one for one in batches if one.rows or one.due]))
        self.taken += found
        return [one.tenant for one, _ in found]

    def end(self) -> None:
        """End the row that was taken first."""
        self.places.leave(*self.taken.pop(0))


def batch(tenant: str, rows: int, text: bytes = TEXT, weight: float | None = None) -> OpenBatch:
    one = OpenBatch(batch_of(f"b-{tenant}", "in", tenant, state="in_progress", weight=weight))
    one.rows.extend(Row(number, text) for number in range(rows))
    return one


@asynccontextmanager
async def waiting(places: Places, one: OpenBatch, number: int) -> AsyncIterator[list[asyncio.Event]]:
    """Let rows of a batch wait for their next try; the events make it due."""
    due = [asyncio.Event() for _ in range(number)]

    async def wait(event: asyncio.Event) -> None:
        async with places.away(one):
            await event.wait()

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for event in due:
            group.create_task(wait(event))
        await asyncio.sleep(0)
        yield due


def test_as_many_rows_have_a_place_as_the_limit_allows() -> None:
    site, one = Site(limit=4), batch("anna", 10)
    assert len(site.fill(one)) == 4
    assert site.fill(one) == []
    assert (site.places.in_flight, site.places.used, one.in_flight) == (4, 4, 4)
    site.end()
    assert [row.line for _, row in site.taken] == [1, 2, 3]
    assert len(site.fill(one)) == 1


def test_tenants_share_the_places_by_weight() -> None:
    site = Site(limit=16)
    anna, ben = batch("anna", 200, weight=3.0), batch("ben", 200)
    assert Counter(site.fill(anna, ben)) == {"anna": 12, "ben": 4}
    found: Counter[str] = Counter()
    for _ in range(100):
        site.end()
        found.update(site.fill(anna, ben))
    assert found["anna"] == pytest.approx(75, abs=3)


def test_few_rows_are_taken_at_once_and_the_others_soon() -> None:
    site, one = Site(limit=1000), batch("anna", 1000)
    assert len(site.fill(one)) == FILL_ROWS
    assert site.calls == 1
    while one.rows:
        assert site.fill(one)
    assert site.places.in_flight == 1000


def test_bytes_bound_the_rows_but_for_the_first_of_each_tenant() -> None:
    site = Site(limit=16, max_bytes=2 * len(TEXT))
    large = 5 * TEXT
    assert site.fill(batch("anna", 3, large)) == ["anna"]
    assert site.fill(batch("ben", 3, large)) == ["ben"]
    assert site.fill(batch("anna", 3)) == []
    site.end()
    site.end()
    assert len(site.fill(batch("anna", 3))) == 2


async def test_a_row_that_waits_for_its_next_try_has_no_place() -> None:
    site, anna, ben = Site(limit=4), batch("anna", 4), batch("ben", 4)
    assert len(site.fill(anna)) == 4
    async with waiting(site.places, anna, 4) as due:
        assert (site.places.in_flight, site.places.used) == (4, 0)
        assert site.fill(ben) == ["ben"] * 4
        for event in due:
            event.set()
        await asyncio.sleep(0)
        assert site.fill(anna) == []
        assert len(anna.due) == 4
        for _ in range(8):
            site.end()
        assert site.fill(anna) == []
        assert not anna.due
    assert site.places.in_flight == 0


async def test_a_row_that_is_due_goes_before_one_that_was_not_taken() -> None:
    site, anna = Site(limit=2), batch("anna", 3)
    assert len(site.fill(anna)) == 2
    async with waiting(site.places, anna, 1) as (due,):
        due.set()
        await asyncio.sleep(0)
        assert site.fill(anna) == []
        assert not anna.due
        assert len(anna.rows) == 1
        assert site.places.used == 2


async def test_a_tenant_whose_rows_wait_is_passed_over() -> None:
    site = Site(limit=4)
    anna, ben = batch("anna", 20), batch("ben", 4)
    site.fill(anna)
    async with waiting(site.places, anna, 4) as due:
        # As many as the limit are in flight of it; none of the others is taken.
        assert site.fill(anna, ben) == ["ben"] * 4
        for event in due:
            event.set()
        for _ in range(4):
            site.places.leave(*site.taken.pop())
        await asyncio.sleep(0)
        site.fill(anna)


async def test_a_stop_gives_places_to_due_and_later_rows() -> None:
    site, anna, ben = Site(limit=2), batch("anna", 2), batch("ben", 2)
    site.fill(anna)
    async with waiting(site.places, anna, 2) as (first, second):
        assert site.fill(ben) == ["ben"] * 2
        first.set()
        await asyncio.sleep(0)
        assert len(anna.due) == 1
        site.places.stop(anna)
        assert not anna.due
        second.set()
    assert not anna.takes_rows
    assert site.places.used == site.places.in_flight == 4


def test_a_tenant_without_batches_is_forgotten_once_its_rows_have_ended() -> None:
    site, one = Site(), batch("anna", 1)
    site.fill(one)
    site.places.keep(set())
    site.end()
    site.places.keep(set())
    assert site.places.in_flight == 0
    # A tenant that comes anew takes all places.
    assert site.fill(batch("anna", 9)) == ["anna"] * 4


WEIGHTS = {"anna": 3.0, "ben": 1.0}


def starts(shares: Shares, limit: int, rows: int) -> list[str]:
    """Return the tenants of rows of which `limit` are in flight; the earliest one ends first."""
    in_flight: deque[str] = deque()
    found = []
    for _ in range(rows):
        if len(in_flight) == limit:
            shares.end(in_flight.popleft())
        tenant = min(WEIGHTS, key=lambda name: shares.turn(name, WEIGHTS[name]))
        shares.start(tenant, WEIGHTS[tenant])
        in_flight.append(tenant)
        found.append(tenant)
    while in_flight:
        shares.end(in_flight.popleft())
    return found


@pytest.mark.parametrize("limit", [1, 4, 8, 64])
def test_rows_are_shared_by_weight(limit: int) -> None:
    found = Counter(starts(Shares(), limit, 400))
    assert found["anna"] == pytest.approx(300, abs=1)


def test_a_tenant_that_joins_has_no_credit() -> None:
    shares = Shares()
    for _ in range(100):
        shares.start("ben", 1.0)
        shares.end("ben")
    assert starts(shares, 1, 40).count("ben") == pytest.approx(10, abs=1)


def test_tenants_without_batches_are_forgotten() -> None:
    shares = Shares()
    shares.start("anna", 1.0)
    shares.start("ben", 1.0)
    shares.end("ben")
    shares.keep(set())
    # One row is in flight still.
    assert shares.turn("anna", 1.0)[0] == 1
    shares.end("anna")
    shares.keep({"anna"})
    assert shares.turn("anna", 1.0)[1] > shares.turn("ben", 1.0)[1]


@pytest.mark.parametrize("state", STATES)
def test_rows_are_sent_in_progress_only(state: State) -> None:
    batch = OpenBatch(batch_of("b", "in", state=state))
    assert batch.takes_rows == (state == "in_progress")


async def test_no_row_is_sent_once_it_stops() -> None:
    batch = OpenBatch(batch_of("b", "in", state="in_progress"))
    batch.stopping.set()
    assert not batch.takes_rows


def test_it_is_exhausted_once_all_rows_of_the_input_are_taken() -> None:
    batch = OpenBatch(batch_of("b", "in"))
    assert not batch.exhausted
    batch.rows.append(Row(1, b"{}"))
    batch.read = True
    assert not batch.exhausted
    batch.rows.popleft()
    assert batch.exhausted
