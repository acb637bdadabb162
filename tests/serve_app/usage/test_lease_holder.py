"""Leases of a replica: what they cover, what comes back, and what a reservation costs."""

import time
from typing import Any

import pytest

from serve_app.settings.usage import Quota
from serve_app.usage.lease_holder import SLOTS_S, Lease, LeaseHolder, Reservation, tightest
from serve_app.usage.messages import LIMITS, LeaseID
from serve_app.usage.quota_book import QuotaBook

QUOTA = Quota(
    tokens_per_minute=1_000_000_000,
    tokens_per_day=1_000_000_000,
    requests_per_minute=1_000_000_000,
    max_concurrency=1_000_000,
)
START = 1_790_000_040.0
MOST_CPU_S = 20e-6


class Site:
    """A holder with the quotas of a key and of a tenant, and their book."""

    def __init__(self, quota: Quota = QUOTA) -> None:
        self.at = 0.0
        self.book = QuotaBook({}, 0.0, "process 1")
        self.book.set_tenants({"t": quota}, "1")
        self.holder = LeaseHolder("h", lambda: self.at)
        self.leases = [
            self.holder.lease(LeaseID(subject, kind), quota)
            for subject in ("key k", "tenant t")
            for kind in LIMITS
        ]

    def report(self) -> None:
        sent_at = self.at
        self.holder.apply(self.book.exchange(self.holder.report(), START + self.at, self.at), sent_at)

    def reserve(self, tokens: int) -> Reservation:
        for lease in self.leases:
            lease.ask([tokens if lease.is_tokens else 1])
        self.report()
        for lease in self.leases:
            lease.ask([])
        reservation = self.holder.take(self.leases, tokens)
        assert reservation is not None
        return reservation


def test_a_lease_covers_what_is_free_until_its_window_ends() -> None:
    site = Site()
    for lease in site.leases:
        lease.ask([500 if lease.is_tokens else 5])
    site.report()
    assert site.holder.take(site.leases, 501) is None
    assert site.holder.take(site.leases, 300)
    assert site.holder.take(site.leases, 300) is None
    site.at = 59.9
    site.leases[2].ends_at = site.leases[5].ends_at = 100.0
    assert site.holder.take(site.leases, 100)
    site.at = 60.0
    assert site.holder.take(site.leases, 1) is None


def test_a_failed_try_takes_nothing() -> None:
    site = Site()
    site.reserve(100).settle(0)
    before = [lease.free for lease in site.leases]
    assert site.holder.take(site.leases, 1_000) is None
    assert [lease.free for lease in site.leases] == before


def test_the_rest_is_free_again_at_once_and_only_once() -> None:
    site = Site()
    reservation = site.reserve(100)
    reservation.settle(30)
    reservation.settle(0)
    tokens = [lease.free for lease in site.leases if lease.is_tokens]
    assert tokens == [70, 70]
    assert site.holder.take(site.leases[2:3], 0), "the slot is free"


def test_an_answer_that_takes_more_than_was_reserved_is_counted_in_full() -> None:
    site = Site(Quota(tokens_per_minute=1000, requests_per_minute=5, max_concurrency=5))
    site.reserve(100).settle(900)
    site.report()
    found = tightest(site.leases, "tokens", site.at)
    assert found is not None
    assert found[1] == 100


def test_a_reservation_of_the_last_minute_gives_nothing_to_this_one() -> None:
    site = Site(Quota(tokens_per_minute=1000, tokens_per_day=5000, requests_per_minute=5, max_concurrency=5))
    old = site.reserve(600)
    site.at = 61.0
    new = site.reserve(900)
    old.settle(100)
    assert site.holder.take(site.leases, 200) is None
    new.settle(900)
    for _ in range(3):
        site.report()
    states = {state.name: state.remaining for state in site.book.states(START + 61)["tenant t"]}
    assert states["tokens_per_minute"] == 100
    assert states["tokens_per_day"] == 4000


def test_free_slots_are_not_taken_without_the_service() -> None:
    site = Site()
    site.reserve(1).settle(1)
    slots: list[Lease] = [site.leases[2]]
    assert site.holder.take(slots, 0)
    site.at = SLOTS_S + 1
    assert site.holder.take(slots, 0) is None


def test_a_reservation_costs_little() -> None:
    site = Site()
    # Ahead of a second at a high rate.
    for lease in site.leases:
        lease.ask([100_000])
    site.report()
    holder, leases = site.holder, site.leases

    def rounds(number: int) -> float:
        began = time.process_time()
        for _ in range(number):
            reservation: Any = holder.take(leases, 10)
            reservation.settle(5)
        return (time.process_time() - began) / number

    best = min(rounds(500) for _ in range(20))
    print(f"a reservation in {len(leases)} leases and its end: {best * 1e6:.1f} µs of CPU")
    assert best < MOST_CPU_S


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
