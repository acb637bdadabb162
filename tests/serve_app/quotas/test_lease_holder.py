"""All leases of a replica: what they cover, and what the service hears of them."""

from serve_app.quotas.lease_holder import LeaseHolder
from serve_app.quotas.messages import Kind, LeaseID
from serve_app.quotas.reservation import Reservation
from serve_app.settings.usage import Quota
from tests.serve_app.quotas.site import START, Site

KINDS: tuple[Kind, ...] = ("tokens", "slots")


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


def test_a_report_has_the_leases_that_are_active() -> None:
    site = Site()
    assert site.holder.report().current == ()
    reservation = site.reserve(100)
    report = site.holder.report()
    assert [account.lease for account in report.current] == [lease.id for lease in site.leases]
    assert {account.reserved for account in report.current if account.lease.kind == "tokens"} == {100}
    assert [subject for subject, _ in report.keys] == ["key k"]
    reservation.settle(40)
    assert {account.used for account in site.holder.report().current} == {40, 1, 0}


def test_without_the_service_a_replica_takes_its_share_and_reports_it_later() -> None:
    quota = Quota(tokens_per_minute=100, max_concurrency=2)
    holder = LeaseHolder("h", lambda: 0.0)
    leases = [holder.lease(LeaseID("tenant t", kind), quota) for kind in KINDS]
    first = holder.take_share(leases, 60, START)
    assert isinstance(first, Reservation)
    refused = holder.take_share(leases, 60, START)
    assert not isinstance(refused, Reservation)
    assert (refused.name, refused.remaining) == ("tokens_per_minute", 40)
    first.settle(30)
    second = holder.take_share(leases, 60, START)
    assert isinstance(second, Reservation)
    assert first.periods == second.periods == ("local 1", "local 1")
    past = {account.lease.kind: account for account in holder.report().past}
    assert (past["tokens"].used, past["tokens"].reserved) == (30, 60)
    assert (past["slots"].used, past["slots"].reserved) == (0, 1)
