"""The place of one record in a window of in-flight cost."""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from batcher.errors import BatcherError
from batcher.fair_share import Queued


class Window(Protocol):
    """What a batcher does for its slots."""

    def _enter(self, slot: "Slot") -> bool:
        """Start a slot at once, if it may."""

    async def _find_room(self, slot: "Slot") -> None:
        """Put a slot into the queue."""

    async def _wait_for_turn(self, slot: "Slot") -> None:
        """Wait until a slot that is in the queue starts."""

    def _leave(self, slot: "Slot", error: BaseException | None) -> None:
        """Take a slot out, wherever it is; the error is what ended its block."""

    def _first_token(self, slot: "Slot") -> None:
        """Take in that a slot's record has its first token."""

    def _outgrown(self, slot: "Slot") -> None:
        """Reserve more for a slot whose record has produced more than was expected."""


class Slot(Queued):
    """The place of one record in the window; `async with` waits for it and gives it back.

    Attributes:
        cost: What the record holds of the capacity now.
        waited_s: Seconds from submission to start.
        output_tokens: Tokens reported so far.
    """

    __slots__ = (
        "_charged",
        "_granted",
        "_lane",
        "_refusal",
        "_running",
        "_used",
        "_wait",
        "_window",
        "cost",
        "deadline",
        "first_at",
        "max_tokens",
        "output_tokens",
        "priority",
        "prompt_tokens",
        "returning",
        "started_at",
        "submitted_at",
        "tenant",
        "waited_s",
    )

    def __init__(
        self,
        window: Window,
        cost: int,
        priority: int,
        tenant: str,
        deadline: float | None,
        wait: bool,
        prompt_tokens: int | None,
        max_tokens: int | None,
        returning: bool,
    ) -> None:
        self.returning = returning
        self.cost = cost
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self._lane = None
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.output_tokens = 0
        self.submitted_at = 0.0
        self.started_at = 0.0
        self.first_at = 0.0
        self.waited_s = 0.0
        self._window = window
        self._wait = wait
        self._used = False
        self._running = False
        self._charged = 0
        self._refusal: BatcherError | None = None
        self._granted: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        if not self._window._enter(self):
            await self._window._find_room(self)
            await self._window._wait_for_turn(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._window._leave(self, error)

    def release(self) -> None:
        """Give the place back before the block ends; more than once does no harm."""
        self._window._leave(self, None)

    def first_token(self) -> None:
        """Tell that the first token is there, for goals to be held against."""
        self._window._first_token(self)

    def report(self, output_tokens: int) -> None:
        """Tell how many tokens the record has produced so far.

        With `max_utilization` a record that outgrows what was reserved for it reserves more, be it over
        the capacity: nothing new starts until the window has room again.

        Args:
            output_tokens: Tokens in all, not since the last report.
        """
        self.output_tokens = output_tokens
        if (
            self.prompt_tokens is not None
            and self._running
            and self.prompt_tokens + output_tokens > self.cost
        ):
            self._window._outgrown(self)
