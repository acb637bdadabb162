"""Reservations: what comes back at their end, and what they cost."""

import time
from typing import Any

import pytest

from serve_app.quotas.lease import tightest
from serve_app.quotas.refusal import refusal
from serve_app.settings.usage import Quota
from tests.serve_app.quotas.site import START, Site

MOST_CPU_S = 20e-6


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


def test_a_refused_slot_is_told_the_measured_time_of_requests() -> None:
    site = Site(Quota(tokens_per_day=1_000_000, requests_per_minute=5, max_concurrency=2))
    slots = site.leases = site.leases[-1:]
    for _ in range(50):
        reservation = site.reserve(1)
        site.at += 60.0
        reservation.settle(1)
        site.report()
    for _ in range(2):
        site.reserve(1)
    site.report()
    error = refusal(slots[0], 1, site.at)
    assert error is not None
    assert error.retry_after_s == pytest.approx(30.0, rel=0.1)
