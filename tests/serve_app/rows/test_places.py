"""Which row is next."""

import asyncio
from collections import Counter

import pytest

from serve_app.jobs.batches import OpenBatch
from serve_app.jobs.models import STATES, State
from serve_app.rows.pacing import Fixed
from serve_app.rows.places import Places, TakenRow, Waits
from serve_app.rows.rows import Row
from tests.batcher.virtual import virtual
from tests.serve_app.jobs.helpers import batch_of

TEXT = b"x" * 10


class Site:
    """Places, and the rows that have one.

    Attributes:
        places: The places under test.
        taken: The rows.
        calls: How often the places told of a change.
    """

    def __init__(self, limit: int = 4, max_bytes: int = 1 << 20) -> None:
        self.calls = 0
        self.places = Places(Fixed(limit), max_bytes, self._changed)
        self.taken: list[TakenRow] = []

    def _changed(self) -> None:
        self.calls += 1

    def fill(self, *batches: OpenBatch) -> list[str]:
        """Give the free places, and return the tenants of the rows that got one."""
        found = self.places.fill([one for one in batches if one.rows or one.due])
        self.taken += found
        return [taken.run.tenant for taken in found]

    def end(self) -> None:
        """End the row that was taken first."""
        self.places.leave(self.taken.pop(0))

    def wait(self, number: int) -> list[TakenRow]:
        """Let the rows that were taken first wait for their next try, and return them."""
        waiting, self.taken = self.taken[:number], self.taken[number:]
        for taken in waiting:
            self.places.wait(taken)
        return waiting


def batch(tenant: str, rows: int, text: bytes = TEXT, weight: float | None = None) -> OpenBatch:
    one = OpenBatch(batch_of(f"b-{tenant}", "in", tenant, state="in_progress", weight=weight))
    one.rows.extend(Row(number, text) for number in range(rows))
    return one


def test_as_many_rows_have_a_place_as_the_limit_allows() -> None:
    site, one = Site(limit=4), batch("anna", 10)
    assert len(site.fill(one)) == 4
    assert site.fill(one) == []
    assert (site.places.in_flight, site.places.used, one.in_flight) == (4, 4, 4)
    site.end()
    assert [taken.row.line for taken in site.taken] == [1, 2, 3]
    assert len(site.fill(one)) == 1


@pytest.mark.parametrize("limit", [1, 4, 8, 16, 64])
def test_tenants_share_the_places_by_weight(limit: int) -> None:
    site = Site(limit=limit)
    anna, ben = batch("anna", 400, weight=3.0), batch("ben", 400)
    found = Counter(site.fill(anna, ben))
    while found.total() < 400:
        found.update(site.fill(anna, ben))
        if site.places.used == limit:
            site.end()
    assert found["anna"] == pytest.approx(300, abs=3)


def test_a_tenant_that_joins_has_no_credit() -> None:
    site, anna, ben = Site(limit=1), batch("anna", 40, weight=3.0), batch("ben", 140)
    for _ in range(100):
        assert site.fill(ben) == ["ben"]
        site.end()
    found: Counter[str] = Counter()
    for _ in range(40):
        found.update(site.fill(anna, ben))
        site.end()
    assert found["ben"] == pytest.approx(10, abs=1)


def test_few_rows_are_taken_at_once_and_the_others_soon() -> None:
    site, one = Site(limit=1000), batch("anna", 1000)
    assert 0 < len(site.fill(one)) < 100
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


def test_a_row_that_waits_for_its_next_try_has_no_place() -> None:
    site, anna, ben = Site(limit=4), batch("anna", 4), batch("ben", 4)
    assert len(site.fill(anna)) == 4
    waiting = site.wait(4)
    assert (site.places.in_flight, site.places.used) == (4, 0)
    assert site.fill(ben) == ["ben"] * 4
    anna.due.extend(waiting)
    assert site.fill(anna) == []
    for _ in range(4):
        site.end()
    assert site.fill(anna) == ["anna"] * 4
    assert site.taken == waiting
    for _ in range(4):
        site.end()
    assert site.places.in_flight == anna.in_flight == 0


def test_a_row_that_is_due_goes_before_one_that_was_not_taken() -> None:
    site, anna = Site(limit=2), batch("anna", 3)
    assert len(site.fill(anna)) == 2
    (due,) = site.wait(1)
    anna.due.append(due)
    site.fill(anna)
    assert site.taken[-1] is due
    assert len(anna.rows) == 1
    assert site.places.used == 2


def test_a_tenant_whose_rows_wait_is_passed_over() -> None:
    site = Site(limit=4)
    anna, ben = batch("anna", 20), batch("ben", 4)
    site.fill(anna)
    site.wait(4)
    # As many rows as the limit are in flight.
    assert site.fill(anna, ben) == ["ben"] * 4


def test_a_row_that_waits_can_leave() -> None:
    site, anna = Site(limit=2), batch("anna", 2)
    site.fill(anna)
    (waiting,) = site.wait(1)
    site.places.leave(waiting)
    assert (site.places.in_flight, site.places.used, anna.in_flight) == (1, 1, 1)


@virtual
async def test_rows_are_due_in_the_order_of_their_times() -> None:
    told: list[float] = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    waits = Waits(lambda: told.append(round(loop.time() - began, 3)))
    run, other = batch("anna", 0), batch("ben", 0)
    rows = {wait_s: TakenRow(run, Row(wait_s, TEXT)) for wait_s in (30, 10, 20, 40)}
    for wait_s, taken in rows.items():
        waits.add(taken, wait_s)
        waits.add(TakenRow(other, Row(wait_s, TEXT)), 15.0)
    assert len(waits.drop(other)) == 4
    await asyncio.sleep(20.0)
    assert list(run.due) == [rows[10], rows[20]]
    # A shorter wait comes before the timer that is set.
    waits.add(TakenRow(other, Row(0, TEXT)), 5.0)
    await asyncio.sleep(30.0)
    assert [taken.row.line for taken in run.due] == [10, 20, 30, 40]
    assert len(other.due) == 1
    assert {10.0, 20.0, 25.0, 30.0, 40.0} <= set(told)
    waits.add(TakenRow(other, Row(0, TEXT)), 5.0)
    waits.close()
    await asyncio.sleep(10.0)
    assert len(other.due) == 1


def test_a_tenant_without_batches_is_forgotten_once_its_rows_have_ended() -> None:
    site, one = Site(), batch("anna", 1)
    site.fill(one)
    site.places.keep(set())
    site.end()
    site.places.keep(set())
    assert site.places.in_flight == 0
    # A tenant that comes anew takes all places.
    assert site.fill(batch("anna", 9)) == ["anna"] * 4


@pytest.mark.parametrize("state", STATES)
def test_rows_are_sent_in_progress_only(state: State) -> None:
    batch = OpenBatch(batch_of("b", "in", state=state))
    assert batch.takes_rows == (state == "in_progress")


def test_no_row_is_sent_once_it_stops() -> None:
    batch = OpenBatch(batch_of("b", "in", state="in_progress"))
    batch.stopping = True
    assert not batch.takes_rows


def test_it_is_exhausted_once_all_rows_of_the_input_are_taken() -> None:
    batch = OpenBatch(batch_of("b", "in"))
    assert not batch.exhausted
    batch.rows.append(Row(1, b"{}"))
    batch.read = True
    assert not batch.exhausted
    batch.rows.popleft()
    assert batch.exhausted
