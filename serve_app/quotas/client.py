"""Reservations of requests in one replica: from its leases, which it renews in the background."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from serve_app.api.errors import RequestError
from serve_app.quotas.lease import Lease, tightest
from serve_app.quotas.lease_holder import LeaseHolder
from serve_app.quotas.messages import (
    LIMITS,
    Answer,
    LeaseID,
    Report,
    key_subject,
    limits_of,
    tenant_subject,
)
from serve_app.quotas.refusal import LEAST_RETRY_S, away_error, check_fits, limit_error, refusal
from serve_app.quotas.reservation import Reservation
from serve_app.quotas.windows import WindowClock
from serve_app.settings.usage import Quota, QuotasSettings
from serve_app.system import cancellation
from serve_app.system.waiting import wait_for_event

logger = logging.getLogger("ray.serve")

POLL_S = 0.2
"""Seconds between two reports of a replica that holds leases: others wait as long for what it has free."""

REST_S = 2.0
"""The same of one that holds none."""

RECALL_S = 0.05
"""Seconds to the next report while a request waits for what others give back."""

MOST_S = 1.0
"""Seconds that a request waits for it, at most."""

START_S = 15.0
"""Seconds for the first answer, at least: the service may start at the same time as this replica."""

RETRY_S = 0.25
"""Seconds between two tries while the service doesn't answer."""

_HEADERS = [
    (kind, [f"x-ratelimit-{value}-{kind}".encode() for value in ("limit", "remaining", "reset")])
    for kind in ("requests", "tokens")
]

Exchange = Callable[[Report], Awaitable[Answer]]


class _Waiting:
    """A request that its leases don't cover."""

    __slots__ = ("asked", "future", "leases", "since", "tokens")

    def __init__(self, leases: Sequence[Lease], tokens: int, since: float) -> None:
        self.leases = leases
        self.tokens = tokens
        self.since = since
        self.asked = False
        self.future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()


class KeyQuota(NamedTuple):
    """The quota of an API key, by the key's name."""

    name: str
    quota: Quota


class QuotaClient:
    """Reserves requests and their tokens for keys and tenants.

    While the leases of this replica cover a request, that takes no time: nothing is awaited. Otherwise the
    service is asked, which calls in what other replicas don't use.

    Args:
        settings: The treatment of requests while the service is away.
        exchange: Sends a report to the service and returns its answer.
        name: Name of this replica, unique and never used again.
        clock: Monotonic clock, in seconds.
        wall: Seconds since the epoch.
    """

    def __init__(
        self,
        settings: QuotasSettings,
        exchange: Exchange,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._exchange = exchange
        self._clock = clock
        self._windows = WindowClock(wall, clock)
        self._holder = LeaseHolder(name, clock, self._gave_back)
        self._tenants: dict[str, Quota] = {}
        self._known = False
        self._leases: dict[tuple[str, str], tuple[Quota | None, tuple[Lease, ...]]] = {}
        self._waiting: list[_Waiting] = []
        self._wake: asyncio.Event | None = None
        self._running: asyncio.Task[None] | None = None
        self._failing_since: float | None = None
        self._due = False

    def start(self) -> None:
        """Begin to report, on the running loop. Further calls do nothing."""
        if self._running is None:
            self._wake = asyncio.Event()
            self._running = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Report no more; the service counts what was leased as used."""
        if self._running is not None:
            self._running.cancel()

    @property
    def away(self) -> bool:
        """True if the service has not answered for `away_s`, or not in its time to start."""
        since = self._failing_since
        return since is not None and self._clock() - since >= self._patience_s

    @property
    def _patience_s(self) -> float:
        return self._settings.away_s if self._known else max(self._settings.away_s, START_S)

    def leases(self, tenant: str, key: KeyQuota | None = None) -> tuple[Lease, ...]:
        """Return the leases of a request; empty: it has no quota.

        Args:
            tenant: Its tenant.
            key: The quota of its key, if it has one.
        """
        # A client may name any tenant: those without a quota are one.
        place = (key.name if key else "", tenant if tenant in self._tenants else "")
        found = self._leases.get(place)
        if found is not None and found[0] is (key.quota if key else None):
            return found[1]
        leases: list[Lease] = []
        subjects = [(key_subject(key.name), key.quota)] if key else []
        if (quota := self._tenants.get(tenant)) is not None:
            subjects.append((tenant_subject(tenant), quota))
        for subject, quota in subjects:
            leases += [
                self._holder.lease(LeaseID(subject, kind), quota) for kind in LIMITS if limits_of(quota, kind)
            ]
        self._leases[place] = (key.quota if key else None, tuple(leases))
        return tuple(leases)

    def reserve_nowait(self, tenant: str, tokens: int, key: KeyQuota | None = None) -> Reservation | None:
        """Reserve a request as `reserve` does, if the leases of this replica cover it; None: they don't."""
        return self._holder.take(self.leases(tenant, key), tokens) if self._known else None

    async def reserve(self, tenant: str, tokens: int, key: KeyQuota | None = None) -> Reservation:
        """Reserve a request.

        Args:
            tenant: Its tenant.
            tokens: Most tokens that it may take, of prompts and answers.
            key: The quota of its key, if it has one.

        Raises:
            RequestError: 429, a limit doesn't allow it now; 400, it never will; 503, the service is away.
        """
        if not self._known:
            await self._first_answer()
        leases = self.leases(tenant, key)
        check_fits(leases, tokens)
        if (found := self._holder.take(leases, tokens)) is not None:
            return found
        if self.away:
            return self._reserve_away(leases, tokens)
        self.start()
        waiting = _Waiting(leases, tokens, self._clock())
        self._waiting.append(waiting)
        self._report_soon()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            # It may have been granted in the same moment.
            if waiting.future.done() and not waiting.future.cancelled() and not waiting.future.exception():
                waiting.future.result().settle(0, request=False)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def headers(self, leases: Sequence[Lease]) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers of the tightest limits of tokens and of requests."""
        now = self._clock()
        headers: list[tuple[bytes, bytes]] = []
        for kind, (limit, remaining, reset) in _HEADERS:
            if (found := tightest(leases, kind, now)) is not None:
                state, left, ends_in_s = found
                headers += (
                    (limit, b"%d" % state.limit),
                    (remaining, b"%d" % left),
                    (reset, _duration(ends_in_s) if left < state.limit else b"0s"),
                )
        return headers

    # Reports

    def _gave_back(self, leases: Sequence[Lease]) -> None:
        if self._waiting:
            self._serve()
            self._report_soon()

    def _report_soon(self) -> None:
        self._due = True
        if self._wake is not None:
            self._wake.set()

    async def _run(self) -> None:
        assert self._wake is not None
        while True:
            # Requests that come while a report is under way belong to the next one.
            self._due = False
            self._wake.clear()
            try:
                again = await self._report()
            except Exception:
                logger.exception("quotas: the leases can't be renewed")
                again = False
            if again:
                continue
            if not self._due:
                await wait_for_event(self._wake, self._pause_s())

    def _pause_s(self) -> float:
        if self._failing_since is not None:
            return RETRY_S
        if self._waiting:
            return RECALL_S
        return POLL_S if self._holder.is_active else REST_S

    async def _report(self) -> bool:
        """Report once; return whether the next report is due at once."""
        asked: dict[Lease, list[int]] = {}
        for waiting in self._waiting:
            for lease in waiting.leases:
                asked.setdefault(lease, []).append(waiting.tokens if lease.is_tokens else 1)
            waiting.asked = True
        for lease, amounts in asked.items():
            lease.ask(amounts)
        sent_at = self._clock()
        report = self._holder.report()
        for lease in asked:
            lease.ask(())
        try:
            async with asyncio.timeout(self._settings.away_s):
                answer = await self._exchange(report)
        except (Exception, asyncio.CancelledError) as error:
            # Quotas is away, or starts again; what it raises, Ray Serve has logged there with its stack.
            if cancellation.is_own():
                raise
            self._fail(sent_at, error)
            return False
        if self._failing_since is not None:
            logger.info("quotas: the service answers again")
            self._failing_since = None
        if answer.tenants is not None:
            self._set_tenants(answer.tenants)
        again = self._holder.apply(answer, sent_at)
        self._known = True
        self._serve()
        self._refuse()
        return again

    def _fail(self, since: float, error: BaseException) -> None:
        if self._failing_since is None:
            self._failing_since = since
            logger.warning("quotas: the service doesn't answer: %r", error)
        for waiting in self._waiting:
            waiting.asked = False
        if not self.away:
            return
        waiting_now, self._waiting = self._waiting, []
        for waiting in waiting_now:
            if waiting.future.done():
                continue
            try:
                waiting.future.set_result(self._reserve_away(waiting.leases, waiting.tokens))
            except RequestError as error:
                waiting.future.set_exception(error)

    def _set_tenants(self, tenants: dict[str, Quota]) -> None:
        changed = {
            name for name in {*tenants, *self._tenants} if tenants.get(name) != self._tenants.get(name)
        }
        # Leases of quotas that are the same keep their settings object.
        self._tenants = {
            name: quota if name in changed else self._tenants[name] for name, quota in tenants.items()
        }
        self._leases.clear()

    def _serve(self) -> None:
        """Give the waiting requests what the leases cover, in their order."""
        left = []
        for waiting in self._waiting:
            if waiting.future.done():
                continue
            found = self._holder.take(waiting.leases, waiting.tokens)
            if found is None:
                left.append(waiting)
            else:
                waiting.future.set_result(found)
        self._waiting = left

    def _refuse(self) -> None:
        """Refuse the waiting requests for which there is nothing, here or elsewhere."""
        now = self._clock()
        left = []
        for waiting in self._waiting:
            short = [lease for lease in waiting.leases if lease.unmet]
            over = now - waiting.since > MOST_S
            if waiting.asked and (over or any(not lease.pending for lease in short)):
                lease = next((lease for lease in short if not lease.pending), None)
                lease = lease or (short or [*waiting.leases])[0]
                error = refusal(lease, waiting.tokens, now) or away_error(self._patience_s)
                waiting.future.set_exception(error)
            else:
                left.append(waiting)
        self._waiting = left

    # Without the service

    async def _first_answer(self) -> None:
        """Wait for the quotas of tenants, as long as the service isn't away."""
        self.start()
        while not self._known and not self.away:
            self._report_soon()
            await asyncio.sleep(RECALL_S)
        if not self._known:
            if self._settings.when_away == "fail_closed":
                raise away_error(self._patience_s)
            self._tenants = dict(self._settings.tenants)

    def _reserve_away(self, leases: Sequence[Lease], tokens: int) -> Reservation:
        if self._settings.when_away == "fail_closed":
            raise away_error(self._patience_s)
        found = self._holder.take_share(leases, tokens, self._windows.now())
        if isinstance(found, Reservation):
            return found
        lease = next(lease for lease in leases if found.name in lease.limits)
        raise limit_error(lease, found, tokens if lease.is_tokens else 1, max(LEAST_RETRY_S, found.ends_in_s))


def _duration(seconds: float) -> bytes:
    """Return a time as OpenAI's headers have it: 6m0s, 2s, 20ms."""
    if seconds < 1:
        return b"%dms" % max(1, math.ceil(seconds * 1000))
    return _whole_seconds(math.ceil(seconds))


# Windows end at the same time for many requests.
@functools.lru_cache(maxsize=128)
def _whole_seconds(seconds: int) -> bytes:
    hours, rest = divmod(seconds, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return b"%dh%dm%ds" % (hours, minutes, last)
    return b"%dm%ds" % (minutes, last) if minutes else b"%ds" % last
