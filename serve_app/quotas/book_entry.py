"""An account as the book of quotas has it."""

import json
from dataclasses import dataclass

from serve_app.quotas.messages import LeaseID
from serve_app.quotas.window_totals import Total


@dataclass(slots=True, eq=False)
class BookEntry:
    """An account as the book has it."""

    lease: LeaseID
    period: str
    holder: str
    totals: tuple[Total, ...]
    granted: int = 0
    used: int = 0
    returned: int = 0
    reserved: int = 0
    closed: bool = False
    gone: bool = False

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The amounts granted, used, returned and reserved."""
        return self.granted, self.used, self.returned, self.reserved

    @property
    def counted(self) -> tuple[int, int, int]:
        """The amounts that it adds to its totals: charged, reserved and free.

        What a holder that is gone has, no one reserves or takes any more.
        """
        return (self.charged, 0, 0) if self.gone else (self.charged, self.reserved, self.free)

    @property
    def charged(self) -> int:
        """The amount that counts as used; an answer may take more than was reserved for it."""
        return max(self.granted - self.returned, self.used + self.reserved)

    @property
    def free(self) -> int:
        """The amount that its holder may still take."""
        return max(0, self.granted - self.returned - self.used - self.reserved)

    @property
    def key(self) -> str:
        """Its key in the saved state."""
        return json.dumps(["account", *self.lease, self.period, self.holder])

    @property
    def text(self) -> str:
        """Its value in the saved state: its numbers, whether it is closed, and its windows."""
        windows = [(total.span, total.window.starts_at) for total in self.totals]
        return json.dumps([*self.numbers, self.closed, windows])
