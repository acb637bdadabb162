"""A file system in memory whose process can be killed at any step, and a ledger on it."""

import fnmatch
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from serve_app.api.scheduling import Scheduling
from serve_app.ledger.calls import Call, CallBook, Sums
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Tokens, Usage
from tests.fakes.clock import Clock
from tests.fakes.disk import KilledError

FOLDER = Path("/ledger")


@dataclass
class Store:
    """State that outlives a process."""

    files: dict[Path, bytes] = field(default_factory=dict)
    times: dict[Path, float] = field(default_factory=dict)


class MemoryDisk:
    """The disk as one process sees it.

    Args:
        store: What outlives the process.
        clock: The time of files.

    Attributes:
        kill_at: The step, from now, at which the process is killed; None: at none.
        kill_share: Share of the data that an append writes before it is killed.
        share: Share of the data that an append writes before it fails.
        failing: Appends fail with an OSError.
        full: Replacements fail too.
        meanwhile: Called before a replacement, as by another thread.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self._clock = clock
        self.kill_at: int | None = None
        self.kill_share = 0.5
        self.share = 0.5
        self.failing = False
        self.full = False
        self.meanwhile: Callable[[], None] = lambda: None

    def _step(self) -> bool:
        """Return whether the process dies in this step."""
        if self.kill_at is None:
            return False
        self.kill_at -= 1
        return self.kill_at < 0

    def append(self, path: Path, data: bytes) -> None:
        dies = self._step()
        if dies or self.failing:
            data = data[: int(len(data) * (self.kill_share if dies else self.share))]
        self.store.files[path] = self.store.files.get(path, b"") + data
        self.store.times[path] = self._clock()
        if dies:
            raise KilledError
        if self.failing:
            raise OSError(28, "No space left on device")

    def replace(self, path: Path, data: bytes) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        if self._step():
            raise KilledError
        if self.full:
            raise OSError(28, "No space left on device")
        self.store.files[path] = data
        self.store.times[path] = self._clock()

    def cut(self, path: Path, size: int) -> None:
        if self._step():
            raise KilledError
        if path in self.store.files:
            self.store.files[path] = self.store.files[path][:size]

    def read(self, path: Path) -> bytes:
        try:
            return self.store.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def size(self, path: Path) -> int:
        return len(self.store.files.get(path, b""))

    def remove(self, path: Path) -> None:
        if self._step():
            raise KilledError
        self.store.files.pop(path, None)

    def files(self, folder: Path, pattern: str) -> list[Path]:
        def matches(path: Path) -> bool:
            parts = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
            wanted = pattern.split("/")
            return len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted))

        folders = {path.parent for path in self.store.files}
        return sorted(path for path in {*self.store.files, *folders} if matches(path))

    def touch(self, path: Path) -> float:
        self.store.files.setdefault(path, b"")
        self.store.times[path] = self._clock()
        return self.store.times[path]

    def modified(self, path: Path) -> float:
        return self.store.times.get(path, float("inf"))


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
