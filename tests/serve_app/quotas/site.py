"""A holder of leases with the book that grants them."""

from serve_app.quotas.book import QuotaBook
from serve_app.quotas.lease_holder import LeaseHolder
from serve_app.quotas.messages import LIMITS, LeaseID
from serve_app.quotas.reservation import Reservation
from serve_app.settings.usage import Quota

QUOTA = Quota(
    tokens_per_minute=1_000_000_000,
    tokens_per_day=1_000_000_000,
    requests_per_minute=1_000_000_000,
    max_concurrency=1_000_000,
)


START = 1_790_000_040.0


class Site:
    """A holder with the quotas of a key and of a tenant, and their book.

    Attributes:
        at: Time on the monotonic clock.
        leases: The leases of a request: tokens, requests and slots of the key, then of the tenant.
    """

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
        """Report, and take over the answer."""
        sent_at = self.at
        self.holder.apply(self.book.exchange(self.holder.report(), START + self.at, self.at), sent_at)

    def reserve(self, tokens: int) -> Reservation:
        """Ask for a reservation, and take it."""
        for lease in self.leases:
            lease.ask([tokens if lease.is_tokens else 1])
        self.report()
        for lease in self.leases:
            lease.ask([])
        reservation = self.holder.take(self.leases, tokens)
        assert reservation is not None
        return reservation
