"""Reservations of requests in the leases of a replica."""

from collections.abc import Callable, Sequence
from typing import Protocol

from serve_app.quotas.lease import Lease
from serve_app.quotas.lease_account import LeaseAccount
from serve_app.quotas.windows import WindowSum

USED = 0.1
"""Weight of the latest request in the moving means."""


class Holder(Protocol):
    """The holder of the leases.

    Attributes:
        clock: Monotonic clock, in seconds.
        gave_back: Called when a request has given something back.
    """

    clock: Callable[[], float]
    gave_back: Callable[[Sequence[Lease]], None]


class Reservation:
    """Reservation of a request; `settle` gives back what it didn't use.

    Attributes:
        leases: The leases that it was taken from.
        tokens: The tokens that are reserved.
    """

    __slots__ = ("_accounts", "_began", "_holder", "_locals", "leases", "tokens")

    def __init__(
        self,
        holder: Holder,
        leases: Sequence[Lease],
        accounts: Sequence[LeaseAccount],
        tokens: int,
        began: float,
        local: Sequence[tuple[WindowSum, bool, int]] = (),
    ) -> None:
        self._holder: Holder | None = holder
        self._accounts = accounts
        self._began = began
        self._locals = local
        self.leases = leases
        self.tokens = tokens

    @property
    def periods(self) -> tuple[str, ...]:
        """The periods of the accounts that it was taken from."""
        return tuple(account.period for account in self._accounts)

    def settle(self, tokens: int | None = None, *, request: bool = True) -> None:
        """End the request. Further calls do nothing.

        Args:
            tokens: The tokens that it has used; None: unknown, so all that were reserved.
            request: The request counts; False: it never ran, as one whose client left while it waited.
        """
        holder, self._holder = self._holder, None
        if holder is None:
            return
        reserved = self.tokens
        used = reserved if tokens is None else tokens
        now = holder.clock()
        for lease, account in zip(self.leases, self._accounts, strict=True):
            lease.hold_s += USED * (now - self._began - lease.hold_s)
            if lease.is_tokens:
                held, spent = reserved, used
                if reserved:
                    lease.used_share += USED * (used / reserved - lease.used_share)
            else:
                held, spent = 1, int(request and lease.kind != "slots")
            account.reserved -= held
            account.used += spent
            if account is lease.account and now < lease.ends_at:
                lease.free += held - spent
            elif held > spent and account.granted:
                account.returned += held - spent
        for total, counts_tokens, since in self._locals:
            if counts_tokens:
                total.add(used - reserved, since)
        holder.gave_back(self.leases)
