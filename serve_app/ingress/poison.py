"""Requests on whose account engines are lost."""

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from serve_app.api.errors import RequestError
from serve_app.ingress.retry import ran_there
from serve_app.relay.request import RelayRequest

MAX_LOST = 2
"""Engines that may be lost in a row while a request runs on them."""

REMEMBERED_S = 300.0
"""Seconds for which a lost engine is held against the requests that ran on it."""

MAX_REMEMBERED = 10_000
"""Requests that are remembered; the oldest go first."""


class PoisonError(RequestError):
    """Too many engines were lost with a request.

    Args:
        consequence: What follows from it.
    """

    def __init__(self, consequence: str) -> None:
        message = f"{MAX_LOST} engines failed one after the other while this request ran; {consequence}."
        super().__init__(500, "internal_error", message, final=True)


class Losses:
    """Engines that were lost in a row while one request ran on them.

    Args:
        count: Those that are known already.

    Attributes:
        count: Their number.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._engines: set[str] = set()

    def add(self, error: Exception, engine: str | None = None) -> bool:
        """Return whether a call failed since its engine was lost while it had the request, and count it.

        Args:
            error: The error of the call.
            engine: Id of the engine, which is lost once: its process may take the request again while it
                ends. None: it isn't known.
        """
        if not ran_there(error):
            return False
        if engine is None:
            self.count += 1
        elif engine not in self._engines:
            self._engines.add(engine)
            self.count += 1
        return True

    def check(self) -> None:
        """Raise a PoisonError if the request may not be tried on another engine."""
        if self.count >= MAX_LOST:
            raise PoisonError("it is not tried again")


class LostEngines:
    """Counts the engines that were lost in a row while the same request ran on them.

    The request that an engine died of can't be told from those that ran beside it. So each of them counts
    the loss, is tried on one more engine, and is forgotten once any engine has answered it: a neighbour's
    second try succeeds, and so does its own after the kill of a healthy engine. A request that loses the
    second engine too is not tried again, and its repeats are refused for `REMEMBERED_S`.

    Requests are the same if route and body are; uploads never are. Nothing is kept of them but a hash.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The engines lost, when, and the size of the body, by hash.
        self._lost: OrderedDict[bytes, tuple[int, float, int]] = OrderedDict()
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return how many requests are remembered."""
        return len(self._lost)

    def count(self, request: RelayRequest) -> int:
        """Return how many engines were lost with a request."""
        self._drop()
        key = self._key(request)
        return 0 if key is None or key not in self._lost else self._lost[key][0]

    def check(self, request: RelayRequest) -> None:
        """Refuse a request that has lost too many engines.

        Raises:
            PoisonError: It has.
        """
        if self.count(request) >= MAX_LOST:
            raise PoisonError("it is refused for some minutes")

    def note(self, request: RelayRequest, lost: int) -> None:
        """Note that an engine was lost with a request.

        Args:
            request: The request.
            lost: Engines that it has lost in a row. The same request may have run several times on an
                engine, which is lost once; so the number is the caller's.
        """
        key, size = _hash(request), len(request.body)
        before = self._remove(key)
        self._lost[key] = max(lost, before), self._clock(), size
        self._sizes[size] += 1
        self._drop()

    def forget(self, request: RelayRequest) -> None:
        """Note that an engine has answered a request."""
        if (key := self._key(request)) is not None:
            self._remove(key)

    def _key(self, request: RelayRequest) -> bytes | None:
        """Return the hash of a request; None: none of its size is remembered, so its body isn't read."""
        return _hash(request) if self._sizes[len(request.body)] else None

    def _remove(self, key: bytes) -> int:
        """Forget a request, and return how many engines were lost with it."""
        if (found := self._lost.pop(key, None)) is None:
            return 0
        lost, _, size = found
        self._sizes[size] -= 1
        if not self._sizes[size]:
            del self._sizes[size]
        return lost

    def _drop(self) -> None:
        """Forget what is over, and what is too much."""
        while self._lost:
            key, (_, at, _) = next(iter(self._lost.items()))
            if len(self._lost) <= MAX_REMEMBERED and self._clock() - at < REMEMBERED_S:
                return
            self._remove(key)


def _hash(request: RelayRequest) -> bytes:
    hash = hashlib.sha256(f"{request.path}\0{request.upload}\0".encode())
    hash.update(request.body)
    return hash.digest()
