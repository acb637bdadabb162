"""A batch that can't end within its window is known at its creation, by what came before it."""

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from serve_app.api.protocol import JSON
from serve_app.jobs.forecast import DAY_S, HOUR_S, DayProfile, Outlook, Queue, RowDemand, in_order, remaining
from serve_app.jobs.models import Batch, batch_object
from tests.serve_app.jobs.helpers import NOW, batch_of

MIDNIGHT = NOW - NOW % DAY_S
WEEK_S = 7 * DAY_S


def steady(rate: float = 1.0, days: int = 6) -> DayProfile:
    """Return a profile of an engine that has done the same in each hour of some days before NOW."""
    profile = DayProfile()
    for hour in range(-24 * days, 0):
        profile.add(rate * HOUR_S, HOUR_S, NOW + hour * HOUR_S)
    return profile


def running(id: str, rows: int, tenant: str = "anna", hours: float = 1, **fields: Any) -> Batch:
    """Return a batch of rows whose bound is one of work each."""
    values = {"state": "in_progress", "total": rows, "work": rows, "expires_at": NOW + round(hours * HOUR_S)}
    return batch_of(id, f"in-{id}", tenant, **(values | fields))


def history(*tenants: str, rows: int = 20, used: float = 1.0, count: int = 30) -> list[Batch]:
    """Return batches that tenants had early in the week, whose rows took a part of their bound."""
    done: JSON = {"state": "completed", "completed": rows, "created_at": NOW - WEEK_S + 9}
    fields = done | {"output_tokens": round(rows * (used * 10 - 1)), "work": rows * 10}
    return [
        running(f"past-{tenant}-{number}", rows, tenant, **fields)
        for tenant in tenants
        for number in range(count)
    ]


def queue_of(
    *batches: Batch, profile: DayProfile | None = None, latest: Iterable[Batch] | None = None
) -> Queue:
    tenants = {batch.tenant for batch in batches}
    demand = RowDemand(history(*tenants) if latest is None else latest, NOW)
    return Queue(batches, (profile or steady()).ahead(NOW), demand, NOW)


def verdicts(queue: Queue) -> dict[str, str]:
    return {id: outlook.verdict for id, outlook in queue.outlooks().items()}


def verdict(rows: int, hours: float = 1, **options: Any) -> str:
    (found,) = verdicts(queue_of(running("b", rows, hours=hours), **options)).values()
    return found


def test_a_batch_that_takes_too_long_says_how_many_rows_remain() -> None:
    (outlook,) = queue_of(running("b", 7200 + 60)).outlooks().values()
    assert outlook.verdict == "late"
    assert "ends 1.0 h after the end of its completion_window" in outlook.message
    assert "about 3,720 of its 7,260 rows" in outlook.message


def test_a_window_holds_is_unsure_or_surely_not() -> None:
    assert [verdict(rows) for rows in (1500, 3400, 7200)] == ["holds", "unsure", "late"]
    (outlook,) = queue_of(running("b", 3400)).outlooks().values()
    assert "before the end of its completion_window" in outlook.message
    assert "is not sure to hold" in outlook.message


def test_without_any_measurement_nothing_is_promised_and_it_says_so() -> None:
    queue = queue_of(running("b", 5), profile=DayProfile())
    (outlook,) = queue.outlooks().values()
    assert outlook.verdict == "unknown"
    assert outlook.message.startswith("No promise")
    assert queue.outlook_of_new(running("b", 5), WEEK_S) == outlook


def test_a_batch_without_any_like_it_is_not_known_well() -> None:
    # Its bound says the most that its answers take; none has said how much of it.
    assert verdict(7200, latest=[]) == "unsure"
    assert verdict(2200, latest=[]) == "unsure"
    assert verdict(2200) == "holds"


def test_what_answers_take_of_their_bound_is_learned() -> None:
    past = history("anna", used=0.2)
    assert verdict(6000, latest=past) == "holds"
    assert verdict(40_000, latest=past) == "late"
    # Its own rows count more than earlier batches.
    own = running("b", 6000, completed=1000, output_tokens=3000)
    assert verdicts(queue_of(own, latest=past)) == {"b": "late"}


def test_rows_that_have_a_result_count_no_more() -> None:
    batch = running("b", 7200, completed=5000, failed=500)
    assert remaining(batch) == 1700
    batch = running("b", 7200, completed=5000, failed=500, output_tokens=0)
    assert verdicts(queue_of(batch)) == {"b": "holds"}


def test_a_batch_that_waits_for_its_validation_counts_by_its_estimate() -> None:
    waiting = running("first", 0, work=3000, state="validating")
    assert verdicts(queue_of(waiting, running("second", 3000)))["second"] == "late"


def test_the_earlier_deadlines_of_the_tenant_go_first() -> None:
    batches = [running("long", 5000, hours=10), running("short", 1500), running("middle", 1000, hours=4)]
    assert [batch.id for batch in in_order(batches)] == ["short", "middle", "long"]
    assert set(verdicts(queue_of(*batches)).values()) == {"holds"}
    same = [running(str(number), 10) for number in range(20)]
    assert in_order(same) == same


def test_rows_that_a_window_ends_delay_no_later_batch() -> None:
    doomed = running("doomed", 10**6)
    assert verdicts(queue_of(doomed, running("next", 2000, hours=4))) == {"doomed": "late", "next": "holds"}


def test_tenants_share_the_rate_by_weight() -> None:
    large = running("large", 100_000, hours=168)
    # The small one gets every second row, and then three of four.
    assert verdicts(queue_of(large, running("small", 2300, "ben")))["small"] == "unsure"
    assert verdicts(queue_of(large, running("small", 2300, "ben", weight=5.0)))["small"] == "holds"
    assert verdicts(queue_of(large, running("small", 2300, "ben", weight=0.2)))["small"] == "late"


def test_what_other_tenants_usually_send_is_kept_free() -> None:
    batch = running("b", 4000, hours=2)
    mine = history("anna")
    assert verdicts(queue_of(batch, latest=mine)) == {"b": "holds"}
    busy = [running(str(number), 5000, "ben", created_at=NOW - number * 7000) for number in range(40)]
    assert verdicts(queue_of(batch, latest=[*mine, *busy])) == {"b": "unsure"}
    # They never get more than their share.
    assert verdicts(queue_of(running("b", 1500, hours=2), latest=[*mine, *busy])) == {"b": "holds"}


def test_many_batches_of_many_tenants_are_forecast_as_each_alone_would_be() -> None:
    random = Random(1)
    tenants = [f"t{number}" for number in range(12)]
    weight = {tenant: random.choice((None, 0.5, 1.0, 4.0)) for tenant in tenants}
    batches = [
        running(str(number), random.randrange(5000), tenant, random.randint(1, 20), weight=weight[tenant])
        for number, tenant in enumerate(random.choices(tenants, k=200))
    ]
    found = verdicts(queue_of(*batches, profile=steady(10.0)))
    work = {tenant: sum(one.total for one in batches if one.tenant == tenant) for tenant in tenants}
    seen = set()
    for tenant in tenants:
        own = 0
        for batch in in_order(one for one in batches if one.tenant == tenant):
            own += batch.total
            others = 0.0
            for other in set(tenants) - {tenant}:
                share = (weight[other] or 1.0) / (weight[tenant] or 1.0)
                others += min(own * share, work[other])
            ends = "late" if own + others > (batch.expires_at - NOW - 60) * 10 else "holds"
            seen.add(found[batch.id])
            assert found[batch.id] in (ends, "unsure")
            if ends == "late":
                # What its window ends is in the way of no later one.
                break
    assert seen == {"holds", "unsure", "late"}


def test_a_forecast_of_many_tenants_looks_at_each_batch_a_few_times() -> None:
    looks = 0

    class Counting(float):
        """A weight that counts the calculations with it."""

        def __rtruediv__(self, other: float) -> float:
            nonlocal looks
            looks += 1
            return float(other) / float(self)

    batches = [running(str(number), 10, f"t{number}", weight=Counting(1.0)) for number in range(300)]
    queue_of(*batches, latest=[]).outlooks()
    assert looks <= 6 * len(batches)


def test_the_rate_of_each_hour_of_the_day_is_learned() -> None:
    profile = DayProfile()
    for hour in range(24 * 6):
        rate = 0.1 if 8 <= hour % 24 < 20 else 1.0
        profile.add(rate * HOUR_S, HOUR_S, MIDNIGHT + (hour - 24 * 6) * HOUR_S)
    evening, morning = profile.ahead(MIDNIGHT + 20 * HOUR_S), profile.ahead(MIDNIGHT + 8 * HOUR_S)
    assert evening is not None
    assert morning is not None
    for ahead, start, night, day in ((evening, 20, 12, 0), (morning, 8, 0, 12)):
        work, error = ahead.until(MIDNIGHT + (start + 12) * HOUR_S)
        assert work == pytest.approx((night + 0.1 * day) * HOUR_S)
        assert 0 < error < 0.1 * work
        assert ahead.when(work) == pytest.approx(MIDNIGHT + (start + 12) * HOUR_S)


def test_later_days_count_more() -> None:
    profile = steady(1.0)
    for hour in range(24 * 9):
        profile.add(3.0 * HOUR_S, HOUR_S, NOW + hour * HOUR_S)
    ahead = profile.ahead(NOW + 9 * DAY_S)
    assert ahead is not None
    assert ahead.until(NOW + 10 * DAY_S)[0] == pytest.approx(3.0 * DAY_S, rel=0.15)


def test_a_profile_that_was_wrong_of_late_promises_less() -> None:
    random = Random(1)
    shaky = DayProfile()
    for hour in range(-24 * 6, 0):
        shaky.add(random.choice((0.5, 1.5)) * HOUR_S, HOUR_S, NOW + hour * HOUR_S)
    assert [verdict(1800, profile=profile) for profile in (steady(), shaky)] == ["holds", "unsure"]


def test_hours_that_were_never_measured_have_a_wider_margin() -> None:
    profile = DayProfile()
    for day in range(-5, 0):
        profile.add(HOUR_S, HOUR_S, NOW + day * DAY_S)
    hour = NOW + HOUR_S - NOW % HOUR_S
    ahead = profile.ahead(NOW)
    assert ahead is not None
    known, error = ahead.until(hour)
    unknown, wider = ahead.until(hour + 2 * (hour - NOW))
    assert unknown == pytest.approx(3 * known)
    assert wider > 4 * error


def test_what_was_measured_is_forgotten_in_the_end() -> None:
    profile = DayProfile()
    profile.add(600.0, 600.0, NOW)
    assert profile.ahead(NOW + 5 * DAY_S) is not None
    assert profile.ahead(NOW + 60 * DAY_S) is None
    profile = DayProfile()
    profile.add(5.0, 5.0, NOW)
    assert profile.ahead(NOW) is None


def test_a_profile_goes_on_from_what_was_stored() -> None:
    stored = DayProfile(steady().hours)
    ahead, before = stored.ahead(NOW), steady().ahead(NOW)
    assert ahead is not None
    assert before is not None
    assert ahead.until(NOW + DAY_S) == before.until(NOW + DAY_S)


def new(batch: Batch, *others: Batch, most_s: float = WEEK_S) -> Outlook:
    return queue_of(*others, batch).outlook_of_new(batch, most_s)


def test_a_new_batch_is_told_the_shortest_window_that_holds() -> None:
    outlook = new(running("b", 7200))
    assert outlook.verdict == "late"
    assert outlook.message.endswith('; the shortest completion_window that holds from now on is "3h"')
    assert new(running("b", 7200, hours=3)).verdict == "holds"
    never = new(running("b", 10**7)).message
    assert "ends more than a day after" in never
    assert never.endswith("; no completion_window up to 7d is sure to hold")


def test_a_new_batch_does_not_break_a_promise_to_its_tenant() -> None:
    promised = running("promised", 7900, hours=3, promised=True)
    outlook = new(running("b", 2300), promised)
    assert outlook.verdict == "breaks"
    assert outlook.message.startswith("With this completion_window, the batch runs before promised")
    # Behind it, it does.
    assert outlook.message.endswith('from now on is "4h"')
    assert new(running("b", 2300, hours=4), promised).verdict == "holds"
    # A window that wasn't promised is no hindrance.
    assert new(running("b", 1500), running("other", 9000, hours=3)).verdict == "holds"


def test_a_batch_shows_its_warning_until_it_has_ended() -> None:
    batch = running("b", 10)
    assert batch_object(batch, "late")["warnings"] == ["late"]
    assert "warnings" not in batch_object(batch)
    assert "warnings" not in batch_object(running("b", 10, state="expired"), "late")
