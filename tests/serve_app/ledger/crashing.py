"""A disk whose process can be killed at any step, and calls of a ledger."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import IO, Any

from serve_app.api.scheduling import Scheduling
from serve_app.ledger.calls import Call, CallBook, Sums
from serve_app.ledger.writer import Disk
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Tokens, Usage
from tests.fakes.clock import Clock
from tests.fakes.disk import KilledError


class DyingDisk(Disk):
    """The disk as one process sees it.

    Attributes:
        kill_at: The step, from now, in which the process is killed; None: in none.
        kill_share: Share of the data that the step writes before the kill.
        share: Share of the data that an append writes before it fails.
        failing: Appends fail with an OSError.
        full: Replacements fail too.
    """

    def __init__(self) -> None:
        self.kill_at: int | None = None
        self.kill_share = 0.5
        self.share = 0.5
        self.failing = False
        self.full = False
        self._open: IO[bytes] | None = None

    def _step(self) -> bool:
        """Return whether the process dies in this step."""
        if self.kill_at is None:
            return False
        self.kill_at -= 1
        if self.kill_at < 0:
            self.kill_at = 0
            return True
        return False

    def killed(self) -> None:
        """Close the file that grows, as the kernel does after a kill."""
        if self._open is not None:
            self._open.close()

    def append(self, file: IO[bytes], data: bytes) -> None:
        self._open = file
        dies = self._step()
        if dies or self.failing:
            data = data[: int(len(data) * (self.kill_share if dies else self.share))]
        super().append(file, data)
        if dies:
            raise KilledError
        if self.failing:
            raise OSError(28, "No space left on device")

    def replace(self, path: Path, data: bytes) -> None:
        if self._step():
            path.with_suffix(".draft").write_bytes(data[: int(len(data) * self.kill_share)])
            raise KilledError
        if self.full:
            raise OSError(28, "No space left on device")
        super().replace(path, data)

    def remove(self, path: Path) -> None:
        if self._step():
            raise KilledError
        super().remove(path)


class FakeSequence:
    """A sequence of an engine that a test counts."""

    def __init__(self, tokens: Tokens = Tokens()) -> None:  # noqa: B008
        self.now = tokens
        self.over = False

    def tokens(self) -> Tokens:
        return self.now

    def ended(self) -> bool:
        return self.over


def book_of(name: str, clock: Clock) -> CallBook:
    """Return the calls of a process."""
    return CallBook("demo", f"replica-{name}", name, clock=clock)


def call_of(
    book: CallBook, tenant: str = "acme", request_id: str = "", now: Callable[[], float] = time.monotonic
) -> Call:
    """Return a call that has not begun."""
    headers = [(b"x-request-id", request_id.encode())] if request_id else []
    return book.open(request_of(tenant, key="ada", headers=headers), RequestUsage(now=now))


def request_of(tenant: str = "acme", **fields: Any) -> RelayRequest:
    """Return a request of a tenant."""
    made = RelayRequest("POST", "/v1/completions", b"", [], b"", Scheduling(tenant=tenant))
    return replace(made, **fields)


def total(book: CallBook) -> Sums:
    """Return the sums of all calls since the start."""
    return reduce(Sums.plus, book.by_tenant().values(), Sums())


def begun(call: Call, sequence: FakeSequence) -> Usage:
    """Return a slot of a call, in which a sequence has begun."""
    slot = call.usage.begin()
    slot.count(sequence)
    return slot


def ran(book: CallBook, tokens: Tokens, tenant: str = "acme") -> Call:
    """Return a call that ran and has ended."""
    call = call_of(book, tenant)
    begun(call, FakeSequence(tokens)).end()
    call.close()
    return call
