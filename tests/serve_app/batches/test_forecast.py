from random import Random

from serve_app.batches.forecast import late, remaining
from serve_app.batches.objects import batch_object
from serve_app.batches.stored import Batch
from tests.serve_app.batches.helpers import NOW, batch_of


def running(id: str, rows: int, tenant: str = "anna", hours: int = 1, **fields: object) -> Batch:
    values = {"state": "in_progress", "total": rows, "expires_at": NOW + hours * 3600} | fields
    return batch_of(id, f"in-{id}", tenant, **values)


def test_a_batch_that_takes_too_long_is_told_with_the_rows_that_are_left_over() -> None:
    batch = running("b", 7200)
    assert late([batch], 2.0, NOW) == {}
    (message,) = late([batch], 1.0, NOW).values()
    assert "1 rows/s" in message
    assert "ends 1.0 h after its completion_window" in message
    assert "about 3,600 of its 7,200 rows" in message


def test_rows_that_have_a_result_count_no_more() -> None:
    batch = running("b", 7200, completed=3000, failed=1000)
    assert remaining(batch) == 3200
    assert late([batch], 1.0, NOW) == {}


def test_nothing_is_said_before_the_rate_is_known_or_the_rows_are() -> None:
    assert late([running("b", 10**9)], 0.0, NOW) == {}
    assert late([running("b", 0, state="validating")], 1.0, NOW) == {}


def test_the_earlier_batches_of_the_tenant_go_first() -> None:
    batches = [running("first", 3000), running("second", 3000), running("other", 100, "ben")]
    assert late(batches, 1.0, NOW).keys() == {"second"}


def test_tenants_share_the_rate() -> None:
    batches = [running("large", 100_000, hours=168), running("small", 3000, "ben")]
    # It gets every second row.
    assert late(batches, 1.0, NOW).keys() == {"small"}
    assert late(batches, 2.0, NOW).keys() == set()


def test_the_rate_is_shared_by_weight() -> None:
    batches = [running("large", 100_000, hours=168), running("small", 2500, "ben", weight=3.0)]
    # It gets three of four rows: 3,333 s.
    assert late(batches, 1.0, NOW).keys() == set()
    batches = [running("large", 100_000, hours=168, weight=2.0), running("small", 1500, "ben")]
    # It gets every third row: 4,500 s.
    assert late(batches, 1.0, NOW).keys() == {"small"}


def test_many_batches_of_many_tenants_are_forecast_as_each_alone_would_be() -> None:
    random = Random(1)
    tenants = [f"t{number}" for number in range(12)]
    weight = {tenant: random.choice((None, 0.5, 1.0, 4.0)) for tenant in tenants}
    batches = [
        running(str(number), random.randrange(5000), tenant, random.randint(1, 20), weight=weight[tenant])
        for number, tenant in enumerate(random.choices(tenants, k=200))
    ]
    wanted = set()
    for place, batch in enumerate(batches):
        own = sum(remaining(one) for one in batches[: place + 1] if one.tenant == batch.tenant)
        others = 0.0
        for tenant in set(tenants) - {batch.tenant}:
            count = sum(remaining(one) for one in batches if one.tenant == tenant)
            share = (weight[tenant] or 1.0) / (weight[batch.tenant] or 1.0)
            others += min(own * share, count)
        if own + others > (batch.expires_at - NOW) * 10 * 1.1:
            wanted.add(batch.id)
    assert 20 < len(wanted) < 180
    assert late(batches, 10.0, NOW).keys() == wanted


def test_a_forecast_looks_at_each_batch_once_or_twice() -> None:
    looks = 0

    class Counting(float):
        """A weight that counts the calculations with it."""

        def __rtruediv__(self, other: float) -> float:
            nonlocal looks
            looks += 1
            return float(other) / float(self)

        def __mul__(self, other: float) -> float:
            nonlocal looks
            looks += 1
            return float(self) * float(other)

        __rmul__ = __mul__

    batches = [running(str(number), 10, f"t{number}", weight=Counting(1.0)) for number in range(300)]
    late(batches, 1.0, NOW)
    assert looks <= 3 * len(batches)


def test_a_batch_shows_its_warning_until_it_has_ended() -> None:
    batch = running("b", 10)
    assert batch_object(batch, "late")["warnings"] == ["late"]
    assert "warnings" not in batch_object(batch)
    assert "warnings" not in batch_object(running("b", 10, state="expired"), "late")
