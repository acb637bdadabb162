"""An account of a lease as its holder keeps it."""

from serve_app.quotas.messages import Account, LeaseID


class LeaseAccount:
    """The numbers of an account; they are those of `messages.Account`."""

    __slots__ = ("granted", "period", "reserved", "returned", "used")

    def __init__(self, period: str) -> None:
        self.period = period
        self.granted = self.used = self.returned = self.reserved = 0

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The amounts used, returned and reserved."""
        return self.used, self.returned, self.reserved

    def message(
        self, id: LeaseID, need: int = 0, least: int = 0, want: int = 0, closed: bool = False
    ) -> Account:
        """Return it as a report has it."""
        return Account(
            id,
            self.period,
            self.granted,
            self.used,
            self.returned,
            self.reserved,
            need,
            least,
            want,
            closed,
        )
