"""The account of a lease."""

from serve_app.quotas.lease_account import LeaseAccount
from serve_app.quotas.messages import Account, LeaseID


def test_a_report_has_its_numbers() -> None:
    account = LeaseAccount("1790000040")
    account.granted, account.used, account.returned, account.reserved = 100, 30, 20, 10
    assert account.numbers == (30, 20, 10)
    id = LeaseID("tenant t", "tokens")
    message = account.message(id, need=7, least=3, want=9)
    assert message == Account(id, "1790000040", 100, 30, 20, 10, 7, 3, 9)
    assert account.message(id, closed=True).closed
