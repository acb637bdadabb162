"""Leases: when they may be taken from, and what remains of their limits."""

import pytest

from serve_app.quotas.lease import IDLE_S, SLOTS_S, Lease, tightest
from serve_app.quotas.messages import Grant, LeaseID
from serve_app.settings.usage import Quota
from tests.serve_app.quotas.site import QUOTA, START, Site


def test_free_slots_are_not_taken_without_the_service() -> None:
    site = Site()
    site.reserve(1).settle(1)
    slots: list[Lease] = [site.leases[2]]
    assert site.holder.take(slots, 0)
    site.at = SLOTS_S + 1
    assert site.holder.take(slots, 0) is None


@pytest.mark.parametrize("kind", ["tokens", "requests"])
def test_the_tightest_limit_is_that_with_the_least_left(kind: str) -> None:
    site = Site(Quota(tokens_per_minute=1000, tokens_per_day=500, requests_per_minute=5, max_concurrency=5))
    site.reserve(100)
    found = tightest(site.leases, kind, site.at)
    assert found is not None
    state, remaining, _ = found
    assert (state.name, remaining) == {
        "tokens": ("tokens_per_day", 400),
        "requests": ("requests_per_minute", 4),
    }[kind]


def test_what_is_free_is_given_back_after_some_time_without_requests() -> None:
    lease = Lease(LeaseID("tenant t", "tokens"), QUOTA, 0.0)
    lease.apply(Grant(lease.id, str(START), 100, 60.0, None, 0, False, (), 1), 0.0)
    lease.taken = 1
    assert lease.report(1.0, 1.0).returned == 0
    assert lease.report(IDLE_S, 1.0).returned == 0
    assert lease.report(IDLE_S + 1, 1.0).returned == 100
    assert lease.free == 0


def test_what_others_need_is_given_back_at_once() -> None:
    lease = Lease(LeaseID("tenant t", "tokens"), QUOTA, 0.0)
    grant = Grant(lease.id, str(START), 100, 60.0, None, 0, False, (), 1)
    assert not lease.apply(grant, 0.0)
    assert lease.apply(grant._replace(keep=30), 1.0)
    assert (lease.free, lease.report(1.0, 1.0).returned) == (30, 70)


def test_a_lease_is_active_until_the_service_has_heard_of_its_use() -> None:
    lease = Lease(LeaseID("tenant t", "tokens"), QUOTA, 0.0)
    active = [lease.is_active]
    lease.account.used = 5
    lease.report(1.0, 1.0)
    active.append(lease.is_active)
    lease.acknowledge()
    active.append(lease.is_active)
    lease.forget()
    active.append(lease.is_active)
    assert active == [False, True, False, True]


def test_a_lease_wants_a_second_of_use_however_often_it_is_reported() -> None:
    lease = Lease(LeaseID("tenant t", "tokens"), QUOTA, 0.0)
    lease.taken = 8_000
    # Requests that wait have it reported again within milliseconds.
    assert lease.report(0.003, 0.003).want <= 8_000
    for interval_s in (0.01, 0.2):
        for step in range(1, round(10 / interval_s) + 1):
            lease.taken = round(10_000 * interval_s)
            want = lease.report(step * interval_s, interval_s).want
        assert 8_000 <= want <= 12_000
