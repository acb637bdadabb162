"""The quotas in an Engine: the reservations of its calls, and the reports to the service.

A call reserves the most that it may use before it runs, and is charged for its use when it ends. A call that
the Engine's blocks cover doesn't wait. Any other call waits for the answer to a report that asks for more.
The call is refused if a limit has too little left, or if other Engines give back too little within `MOST_S`.
"""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from serve_app.api.errors import RequestError
from serve_app.quotas.counters import (
    SLICE,
    HolderAnswer,
    HolderReport,
    LimitState,
    key_subject,
    tenant_subject,
)
from serve_app.quotas.holder import HeldCounter, Holder, Reservation
from serve_app.settings.usage import Quota, QuotasSettings
from serve_app.system import cancellation
from serve_app.system.cancellation import wait_for_event

logger = logging.getLogger("ray.serve")

POLL_S = 0.2
"""Seconds between two reports during changes: other Engines wait as long for amounts freed here."""

REST_S = 2.0
"""Seconds between two reports while calls run and nothing changes."""

RECALL_S = 0.05
"""Seconds to the next report while a call waits for other Engines to give amounts back."""

MOST_S = 1.0
"""Maximum seconds that a call waits for other Engines to give amounts back."""

START_S = 15.0
"""Least timeout of the first answer, in seconds: the service may start at the same time as this process."""

ANSWER_S = 2.0
"""Most seconds for an answer: a report to a process that has died may have none."""

RETRY_S = 0.25
"""Seconds between two tries while the service doesn't answer."""

LEAST_RETRY_S = 0.1
"""Least Retry-After of a refused call, in seconds."""

_HEADERS = [
    (kind, [f"x-ratelimit-{value}-{kind}".encode() for value in ("limit", "remaining", "reset")])
    for kind in ("requests", "tokens")
]


Take = Callable[[HolderReport], Awaitable[HolderAnswer]]
"""Asks the service."""


class Handle(Protocol):
    """The handle of a deployment."""

    @property
    def options(self) -> Callable[..., Any]:
        """Returns the handle with other options."""


def remote_take(handle: Handle) -> Take:
    """Return the method of the Quotas deployment that takes reports."""
    method = handle.options(method_name="take", _by_reference=False, request_serialization="pickle")

    async def take(report: HolderReport) -> HolderAnswer:
        answer: HolderAnswer = await method.remote(report)
        return answer

    return take


class _Waiting:
    """A call that waits, since the amounts here don't cover it."""

    __slots__ = ("asked", "future", "limits", "since", "tokens")

    def __init__(self, limits: Sequence[HeldCounter], tokens: int, since: float) -> None:
        self.limits = limits
        self.tokens = tokens
        self.since = since
        self.asked = False
        self.future: asyncio.Future[Reservation | None] = asyncio.get_running_loop().create_future()


class QuotaClient:
    """Reserves calls and their tokens for keys and tenants.

    Args:
        settings: The treatment of calls while the service is away.
        take: Asks the service.
        name: Name of this process, unique and never used again.
        clock: Monotonic clock, in seconds.

    Attributes:
        unlimited: Calls that ran without limits while the service was away.
    """

    def __init__(
        self,
        settings: QuotasSettings,
        take: Take,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unlimited = 0
        self._settings = settings
        self._ask = take
        self._holder = Holder(name, clock, self._given_back)
        self._monotonic = clock
        self._table = ""
        self._tenants: dict[str, Quota] = {}
        self._known = False
        self._waiting: list[_Waiting] = []
        self._wake: asyncio.Event | None = None
        self._running: asyncio.Task[None] | None = None
        self._failing_since: float | None = None
        self._said_away = False
        self._due = False
        self._resting = True

    def start(self) -> None:
        """Start reporting, on the running loop. Further calls do nothing."""
        if self._running is None:
            self._wake = asyncio.Event()
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop after a last report, so that nothing stays reserved."""
        if self._running is None:
            return
        self._running.cancel()
        self._holder.give_up()
        try:
            await self._send(self._holder.report())
        except Exception as error:
            # The service frees the amounts of a process whose reports are overdue.
            logger.debug("quotas: the last report failed: %r", error)

    @property
    def away(self) -> bool:
        """True if the service has not answered for `away_s`; at the start at least for `START_S`."""
        since = self._failing_since
        return since is not None and self._monotonic() - since >= self._patience_s

    @property
    def _patience_s(self) -> float:
        return self._settings.away_s if self._known else max(self._settings.away_s, START_S)

    def limits(self, tenant: str, quota: Quota | None) -> bool:
        """Return whether a call may have a quota.

        Args:
            tenant: Its tenant.
            quota: The quota of its key; None: the key has no quota.
        """
        return quota is not None or not self._known or tenant in self._tenants

    async def reserve(
        self, tenant: str, tokens: int, key: str = "", quota: Quota | None = None, *, more: bool = False
    ) -> Reservation | None:
        """Reserve a call.

        Args:
            tenant: Its tenant.
            tokens: Maximum tokens that it may take, of prompts and answers.
            key: The name of its key.
            quota: The quota of the key; None: the key has no quota.
            more: Whether these are further tokens of a call with a reservation: only limits of tokens count.

        Returns:
            The reservation, which must be settled; None: the call has no quota, or runs without limits while
            the service is away.

        Raises:
            RequestError: 429, a limit is used up; 400, the call exceeds a limit; 503, the service is away.
        """
        if not self._known and not await self._first_answer():
            self._go_on()
            return None
        limits = [one for one in self._limits_of(tenant, key, quota) if one.is_tokens or not more]
        if not limits:
            return None
        _check_fits(limits, tokens)
        if (found := self._take(limits, tokens)) is not None:
            return found
        if self.away:
            self._go_on()
            return None
        self.start()
        waiting = _Waiting(limits, tokens, self._monotonic())
        self._waiting.append(waiting)
        self._report_soon()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            # The call may have been granted at the same moment.
            future = waiting.future
            if (
                future.done()
                and not future.cancelled()
                and not future.exception()
                and (found := future.result())
            ):
                found.settle(0, request=False)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def headers(self, tenant: str, key: str = "", quota: Quota | None = None) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers of the tightest limits of tokens and of requests."""
        limits = self._limits_of(tenant, key, quota)
        now = self._monotonic()
        headers: list[tuple[bytes, bytes]] = []
        for kind, names in _HEADERS:
            states = [found for one in limits if one.counter.kind == kind for found in one.remaining(now)]
            if states:
                state, left, ends_in_s = min(states, key=lambda found: found[1])
                reset = _duration(ends_in_s) if left < state.limit else b"0s"
                headers += zip(names, (b"%d" % state.limit, b"%d" % left, reset), strict=True)
        return headers

    def _given_back(self) -> None:
        """Serve the waiting calls after a call has given an amount back; without any, wake the reports."""
        if self._waiting:
            self._serve()
            self._report_soon()
        else:
            self._changed()

    def _changed(self) -> None:
        """Wake the reports after a change."""
        if self._resting and self._wake is not None:
            self._wake.set()

    def _limits_of(self, tenant: str, key: str, quota: Quota | None) -> list[HeldCounter]:
        """Return the counters of a call."""
        found = self._holder.limits(key_subject(key), quota) if quota is not None else []
        if (of_tenant := self._tenants.get(tenant)) is not None:
            found += self._holder.limits(tenant_subject(tenant), of_tenant)
        return found

    def _take(self, limits: Sequence[HeldCounter], tokens: int) -> Reservation | None:
        found = self._holder.take(limits, tokens)
        if found is not None:
            self._changed()
        return found

    def _go_on(self) -> None:
        """Let a call go on without limits while the service is away, if the settings allow it.

        Raises:
            RequestError: 503, the settings don't allow it.
        """
        if self._settings.when_away == "refuse":
            raise away_error(self._patience_s)
        self.unlimited += 1

    def _serve(self) -> None:
        """Serve the waiting calls that the amounts here cover, in order."""
        left = []
        for waiting in self._waiting:
            if waiting.future.done():
                continue
            if (found := self._take(waiting.limits, waiting.tokens)) is None:
                left.append(waiting)
            else:
                waiting.future.set_result(found)
        self._waiting = left

    def _refuse(self) -> None:
        """Refuse the waiting calls for which nothing is left, here or in other Engines."""
        now = self._monotonic()
        left = []
        for waiting in self._waiting:
            short = [one for one in waiting.limits if not one.covers(waiting.tokens, now)]
            # The blocks of other Engines may have the rest, and give it back.
            lacking = [one for one in short if _lacks(one, waiting.tokens, now)]
            if waiting.asked and (lacking or now - waiting.since > MOST_S):
                one = next(iter(lacking or short or waiting.limits))
                waiting.future.set_exception(_refusal(one, waiting.tokens, now))
            else:
                left.append(waiting)
        self._waiting = left

    # Reports

    def _report_soon(self) -> None:
        self._due = True
        if self._wake is not None:
            self._wake.set()

    async def _run(self) -> None:
        assert self._wake is not None
        while True:
            # The next report has the calls that arrive during a report.
            self._due = False
            self._wake.clear()
            try:
                await self._exchange()
            except Exception:
                logger.exception("quotas: a report failed")
            await self._until_due(self._pause_s())

    async def _until_due(self, seconds: float) -> None:
        """Wait for the next report: at most some seconds, fewer after a change, none if a report is due."""
        assert self._wake is not None
        began = self._monotonic()
        # If a report comes soon, calls need not wake this task.
        self._resting = seconds > POLL_S
        while not self._due and (left := began + seconds - self._monotonic()) > 0:
            if await wait_for_event(self._wake, left) or self._wake.is_set():
                self._wake.clear()
                seconds = min(seconds, self._pause_s())
                self._resting = seconds > POLL_S

    def _pause_s(self) -> float:
        """Return the seconds to the next report."""
        if self._failing_since is not None or not self._known:
            return RETRY_S
        if self._holder.has_more:
            return 0.0
        if self._waiting:
            return RECALL_S
        return POLL_S if self._holder.busy else REST_S

    async def _send(self, report: HolderReport) -> HolderAnswer:
        async with asyncio.timeout(min(self._settings.away_s, ANSWER_S)):
            return await self._ask(report)

    async def _exchange(self) -> None:
        """Report once."""
        for one in self._waiting[:SLICE]:
            one.asked = True
        sent_at = self._monotonic()
        report = self._holder.report([(one.limits, one.tokens) for one in self._waiting])
        try:
            answer = await self._send(report._replace(table=self._table))
        except (Exception, asyncio.CancelledError) as error:
            # The service is away, or restarts; Ray Serve logs its exceptions there, with their stack.
            if cancellation.is_own():
                raise
            self._fail(sent_at, error)
            return
        if self._failing_since is not None:
            logger.info("quotas: the service answers again")
            self._failing_since = None
        if answer.tenants is not None:
            self._tenants, self._table = answer.tenants, answer.table
            self._holder.set_tenants({tenant_subject(name): one for name, one in self._tenants.items()})
        self._holder.apply(answer, sent_at)
        self._known = True
        self._serve()
        self._refuse()

    def _fail(self, since: float, error: BaseException) -> None:
        if self._failing_since is None:
            self._failing_since = since
            logger.warning("quotas: the service doesn't answer: %r", error)
            self._said_away = False
        for waiting in self._waiting:
            waiting.asked = False
        if not self.away:
            return
        if self._settings.when_away == "serve" and not self._said_away:
            self._said_away = True
            logger.warning("quotas: the service is away, and requests run without limits until it answers")
        waiting_now, self._waiting = self._waiting, []
        for waiting in waiting_now:
            if waiting.future.done():
                continue
            try:
                self._go_on()
                waiting.future.set_result(None)
            except RequestError as refusal:
                waiting.future.set_exception(refusal)

    async def _first_answer(self) -> bool:
        """Wait for the quotas of tenants while the service isn't away; return whether they are known."""
        self.start()
        while not self._known and not self.away:
            self._report_soon()
            await asyncio.sleep(RECALL_S)
        return self._known


# Refusals


def _check_fits(limits: Iterable[HeldCounter], tokens: int) -> None:
    """Raise an error if a call can never have its tokens.

    Raises:
        RequestError: 400, with the name of the limit.
    """
    for one in limits:
        if not one.is_tokens:
            continue
        name, limit = min(one.limits.items(), key=lambda item: item[1])
        if tokens > limit:
            message = (
                f"{one.counter.subject}: {name} {limit}: this request may take {tokens} tokens, which never "
                "fit in; lower max_tokens, or send a shorter prompt"
            )
            raise RequestError(400, "invalid_request_error", message, param="max_tokens")


def _lacks(limits: HeldCounter, tokens: int, now: float) -> bool:
    """Return whether a limit, with the rest of all blocks, has too little left for a call."""
    return any(left < limits.amount(tokens) for _, left, _ in limits.remaining(now))


def _refusal(limits: HeldCounter, tokens: int, now: float) -> RequestError:
    """Return the error of a call that a limit doesn't allow now: 429; 503 if no limit is known."""
    amount = limits.amount(tokens)
    states = limits.remaining(now)
    if not states:
        return away_error(MOST_S)
    # Of the limits with too little left, the limit with the longest wait counts.
    short = [found for found in states if found[1] < amount] or [min(states, key=lambda found: found[1])]
    seconds, (state, left, _) = max(
        ((_wait_s(limits, *found, amount), found) for found in short), key=lambda pair: pair[0]
    )
    asked = f"may take {amount} tokens" if limits.is_tokens else "needs one"
    message = (
        f"{limits.counter.subject}: {state.name} {state.limit}: this request {asked}, and {left} are left. "
        f"Try again in {seconds:.1f} s."
    )
    return RequestError(429, "rate_limit_error", message, retry_after_s=seconds)


def _wait_s(limits: HeldCounter, state: LimitState, left: int, ends_in_s: float, amount: int) -> float:
    """Return the seconds after which a call is likely to fit.

    Running calls give back the unused part of their reservations, evenly over their usual time; a new window
    has its whole limit.
    """
    back = float(state.reserved)
    if limits.counter.kind != "slots":
        back = back * (1 - limits.used_share) if limits.is_tokens else 0.0
    lacking = max(1, amount - left)
    given_back_s = limits.hold_s * lacking / back if back >= lacking else math.inf
    seconds = min(ends_in_s, given_back_s)
    return max(LEAST_RETRY_S, seconds if math.isfinite(seconds) else limits.hold_s)


def away_error(seconds: float) -> RequestError:
    """Return the error of a call while the service has not answered for `seconds`: 503."""
    message = f"The quotas of this service have not answered for {seconds:g} s. Try again."
    return RequestError(503, "service_unavailable", message, retry_after_s=max(1.0, seconds))


def _duration(seconds: float) -> bytes:
    """Return a time in the format of OpenAI's headers: 6m0s, 2s, 20ms."""
    if seconds < 1:
        return b"%dms" % max(1, math.ceil(seconds * 1000))
    return _whole_seconds(math.ceil(seconds))


# Windows end at the same time for many calls.
@functools.lru_cache(maxsize=128)
def _whole_seconds(seconds: int) -> bytes:
    hours, rest = divmod(seconds, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return b"%dh%dm%ds" % (hours, minutes, last)
    return b"%dm%ds" % (minutes, last) if minutes else b"%ds" % last
