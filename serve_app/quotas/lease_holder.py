"""All leases of one replica, and its side of the reports to the service that grants them.

Nothing here waits or does I/O. `quota_book` is the other side.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from serve_app.quotas.lease import Lease
from serve_app.quotas.lease_account import LeaseAccount
from serve_app.quotas.messages import Answer, LeaseID, LimitState, Report
from serve_app.quotas.reservation import Reservation
from serve_app.quotas.windows import WindowSum
from serve_app.settings.usage import Quota


class _Past(NamedTuple):
    lease: Lease
    account: LeaseAccount


class LeaseHolder:
    """All leases of this replica.

    Args:
        name: Unique name, never used again.
        clock: Monotonic clock, in seconds.
        gave_back: Called when a request has given something back.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        gave_back: Callable[[Sequence[Lease]], None] = lambda leases: None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.gave_back = gave_back
        self._leases: dict[LeaseID, Lease] = {}
        self._number = 0
        self._service = ""
        self._table = ""
        self._reported_at = clock()
        self._closing: list[_Past] = []
        self._reported: list[Lease] = []

    def lease(self, id: LeaseID, quota: Quota) -> Lease:
        """Return the lease of a thing; it is made if need be."""
        lease = self._leases.get(id)
        if lease is None:
            lease = self._leases[id] = Lease(id, quota, self.clock())
        elif lease.quota is not quota:
            lease.set_quota(quota)
        return lease

    def take(self, leases: Sequence[Lease], tokens: int) -> Reservation | None:
        """Reserve one request and its tokens in all leases; None: one of them doesn't cover it."""
        now = self.clock()
        for lease in leases:
            if lease.free < (tokens if lease.is_tokens else 1) or now >= lease.ends_at:
                return None
        accounts = []
        for lease in leases:
            amount = tokens if lease.is_tokens else 1
            lease.free -= amount
            lease.taken += amount
            account = lease.account
            account.reserved += amount
            accounts.append(account)
        return Reservation(self, leases, accounts, tokens, now)

    def take_share(self, leases: Sequence[Lease], tokens: int, wall: float) -> Reservation | LimitState:
        """Reserve from this replica's share of each limit, while the service is away.

        Args:
            leases: The leases of the request.
            tokens: Its tokens.
            wall: Seconds since the epoch.

        Returns:
            The reservation; or the limit that doesn't allow it.
        """
        taken: list[tuple[WindowSum, bool, int]] = []
        for lease in leases:
            amount = tokens if lease.is_tokens else 1
            for name, limit in lease.limits.items():
                share = limit // lease.holders
                if lease.kind == "slots":
                    held = lease.held
                    if held + 1 > max(1, share):
                        return LimitState(name, limit, 0, held, lease.hold_s)
                    continue
                total = lease.local_sum(name)
                window, used = total.at(wall)
                if used + amount > share:
                    return LimitState(name, limit, max(0, share - used), 0, window.ends_at - wall)
                taken.append((total, lease.is_tokens, window.starts_at))
        for total, counts_tokens, since in taken:
            total.add(tokens if counts_tokens else 1, since)
        accounts = []
        for lease in leases:
            account = lease.local_account()
            account.reserved += tokens if lease.is_tokens else 1
            accounts.append(account)
        return Reservation(self, leases, accounts, tokens, self.clock(), taken)

    def report(self) -> Report:
        """Return the report that is due, of all leases that are active."""
        now = self.clock()
        elapsed = max(1e-3, now - self._reported_at)
        self._reported_at = now
        self._number += 1
        self._closing, self._reported = [], []
        current, past, keys = [], [], {}
        for lease in self._leases.values():
            lease.expire(now)
            if not lease.is_active:
                continue
            if lease.id.subject.startswith("key "):
                keys[lease.id.subject] = lease.quota
            current.append(lease.report(now, elapsed))
            self._reported.append(lease)
            for account in lease.past:
                closed = not account.reserved
                past.append(account.message(lease.id, closed=closed))
                if closed:
                    self._closing.append(_Past(lease, account))
        return Report(
            self.name,
            self._number,
            self._service,
            self._table,
            tuple(current),
            tuple(past),
            tuple(keys.items()),
        )

    def apply(self, answer: Answer, sent_at: float) -> bool:
        """Take over the answer to the last report.

        Args:
            answer: The answer. That to an earlier report must not come here.
            sent_at: When the report was made, on the holder's clock.

        Returns:
            Whether the next report is due at once: others wait for what it gives back.
        """
        heard = answer.service == self._service
        returned = not heard
        if heard:
            for lease in self._reported:
                lease.acknowledge()
        for grant in answer.grants:
            returned |= self._leases[grant.lease].apply(grant, sent_at)
        if heard:
            for lease, account in self._closing:
                # An account that was granted more meanwhile is the current one again.
                if account in lease.past:
                    lease.past.remove(account)
        else:
            # A new process takes over what is reported from the next report on, which has all accounts.
            self._service = answer.service
            for lease in self._leases.values():
                lease.forget()
        self._closing, self._reported = [], []
        self._table = answer.table
        return returned

    @property
    def is_active(self) -> bool:
        """True if any lease is."""
        return any(lease.is_active for lease in self._leases.values())
