"""Bound on the bytes of all request bodies that an Ingress replica holds at once."""

from collections.abc import MutableMapping
from typing import Any

from serve_app.api.errors import RequestError

SMALL = 64 * 1024
"""A body up to this many bytes may use the whole budget, a larger one may not use its last part: so large
bodies can't keep out small ones."""

LAST_PART = 8
"""The last part of the budget is one in so many."""

RETRY_AFTER_S = 1.0
"""Seconds after which a refused client comes back. A large body on its way gives up its bytes once it is
answered, which may be at any time."""


class BodyBudget:
    """Counts the bytes of the bodies that this replica holds.

    Args:
        most: Most bytes at once.

    Attributes:
        held: Bytes held now.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def check(self, size: int, more: int) -> None:
        """Raise if a body has no room for more bytes.

        Args:
            size: Bytes of the body, with those.
            more: Bytes that are not counted yet.

        Raises:
            RequestError: 503, with the seconds to wait.
        """
        most = self._most if size <= SMALL else self._most - self._most // LAST_PART
        if self.held + more > most:
            message = (
                f"The requests that are being served hold {self.held} bytes of the {self._most} for request "
                "bodies (ingress.max_bytes_in_flight). Try again."
            )
            raise RequestError(503, "overloaded_error", message, retry_after_s=RETRY_AFTER_S)


class HeldBody:
    """The bytes that one request holds of a budget.

    Args:
        budget: The budget.
    """

    __slots__ = ("_budget", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    def expect(self, size: int) -> None:
        """Raise a RequestError, 503, if a body of `size` bytes that is to come has no room now.

        Nothing is counted: a client that announces bytes and doesn't send them keeps nobody else out.
        """
        self._budget.check(size, size - self.size)

    def add(self, size: int) -> None:
        """Count bytes that have come; raise a RequestError, 503, if they have no room."""
        self._budget.check(self.size + size, size)
        self._budget.held += size
        self.size += size

    def give_back(self) -> None:
        """Give all bytes back."""
        self._budget.held -= self.size
        self.size = 0


def held_body(scope: MutableMapping[str, Any]) -> HeldBody:
    """Return what a request holds of its replica's budget."""
    body: HeldBody = scope["state"]["context"].body
    return body
