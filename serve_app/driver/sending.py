"""Sends a chunk until each of its rows has a result or a final error."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.dataset.errors import DriverError, RowError
from serve_app.driver.chunks import Chunk, Item
from serve_app.driver.clients import Client
from serve_app.driver.run_stats import RunStats
from serve_app.jobs.pacing import RETRYABLE, Backoff, Concurrency
from serve_app.system.waiting import wait_for_event

RECENT_FAILURES = 6
"""Failures of a call during which others have to succeed, if its rows are the cause and not an outage."""

HALF_RETRIES = 2
"""Retries of each half of a call that failed at every try."""


class StoppedError(Exception):
    """The run was stopped while a chunk waited for its next try."""


class GaveUpError(DriverError):
    """The service failed at every try."""


@dataclass(slots=True, frozen=True)
class _Try:
    """Rows to send in one call.

    Attributes:
        items: The rows.
        retries: Most retries of the call.
        answered: Answered calls of the whole run at an earlier time. If there are more now, the service
            works, and these rows are the cause of the failures.
        attempts: Number of earlier calls with these rows.
        whole: Number of calls with all rows of the chunk, if these are a part of them; else 0.
    """

    items: Sequence[Item]
    retries: int
    answered: int
    attempts: int = 0
    whole: int = 0

    def after(self, attempts: int, answered: int) -> "_Try":
        """Return a copy after more attempts."""
        return replace(self, attempts=self.attempts + attempts, answered=answered)

    def rows(self) -> "list[_Try]":
        """Return each row alone."""
        few = min(self.retries, HALF_RETRIES)
        part = replace(self, retries=few, whole=self.whole or self.attempts)
        return [replace(part, items=[item]) for item in self.items]

    def halves(self) -> "tuple[_Try, _Try]":
        """Return both halves, with few retries since the whole has failed at all of its tries."""
        middle = len(self.items) // 2
        few = min(self.retries, HALF_RETRIES)
        half = replace(self, retries=few, whole=self.whole or self.attempts)
        return (
            replace(half, items=self.items[:middle]),
            replace(half, items=self.items[middle:]),
        )


def _gave_up(what: _Try, error: RequestError) -> GaveUpError:
    tries = what.whole or what.attempts
    parts = f", and {what.attempts - tries} of a part of it" if what.whole else ""
    return GaveUpError(
        f"gave up after {tries} {'try' if tries == 1 else 'tries'} of a call{parts}: {error.message}\n"
        "When the service is back, run the same command again: it goes on from here"
    )


class Sender:
    """Sends chunks.

    Args:
        client: The service.
        body: Fields of every call, without the prompts.
        chat: Whether prompts are lists of messages.
        retries: Most retries of a call.
        backoff: Waits between retries.
        concurrency: Limit that adapts to answers and refusals.
        stats: Statistics to update.
        stopping: Set when no more calls may be sent.
    """

    def __init__(
        self,
        client: Client,
        body: JSON,
        *,
        chat: bool,
        retries: int,
        backoff: Backoff,
        concurrency: Concurrency,
        stats: RunStats,
        stopping: asyncio.Event,
    ) -> None:
        self._client = client
        self._body = body | {"partial": True, "details": True}
        self._field = "messages" if chat else "prompts"
        self._retries = retries
        self._backoff = backoff
        self._concurrency = concurrency
        self._stats = stats
        self._stopping = stopping

    async def send(self, chunk: Chunk) -> list[JSON]:
        """Return the output rows of a chunk.

        Raises:
            DriverError: No row could be served: the service refuses the calls, or is gone.
            StoppedError: The run was stopped first.
        """
        rows = [
            item.failed(item.prompt.type, item.prompt.message, 0)
            for item in chunk
            if isinstance(item.prompt, RowError)
        ]
        if asked := [item for item in chunk if not isinstance(item.prompt, RowError)]:
            rows += await self._ask(_Try(asked, self._retries, self._stats.calls))
        return sorted(rows, key=lambda row: int(row["row"]))

    async def _ask(self, what: "_Try") -> list[JSON]:
        """Send rows until they are answered; return their output rows."""
        body = self._body | {
            self._field: [item.prompt for item in what.items],
            "task_id": f"rows_{what.items[0].number}_{what.items[-1].number}",
        }
        failures = refusals = 0
        answered = deque([what.answered], maxlen=RECENT_FAILURES)
        while True:
            try:
                answer = await self._call(body)
            except RequestError as error:
                if error.status == 429:
                    # A full queue isn't a failure: live traffic may fill it for hours.
                    refusals += 1
                    self._concurrency.refused(error.retry_after_s)
                else:
                    failures += 1
                if error.final or error.status not in RETRYABLE or failures > what.retries:
                    return await self._isolate(what.after(failures + refusals, answered[0]), error)
                answered.append(self._stats.calls)
                self._stats.trouble = error.message
                await self._wait(self._backoff.wait_s(failures + refusals, error.retry_after_s))
                self._stats.retries += 1
            else:
                return _rows(what.items, answer, what.attempts + failures + refusals + 1)

    async def _call(self, body: JSON) -> JSON:
        started = time.monotonic()
        self._stats.in_flight += 1
        try:
            answer = await self._client.generate(body)
        finally:
            self._stats.in_flight -= 1
        count = len(body[self._field])
        lists = [answer.get(name) for name in ("results", "details")]
        lengths = [len(found) if isinstance(found, list) else 0 for found in lists]
        if lengths != [count, count]:
            message = f"an answer with {lengths[0]} results for {count} prompts"
            raise RequestError(502, "service_unavailable", message)
        self._stats.calls += 1
        self._stats.trouble = ""
        self._stats.latencies.add(time.monotonic() - started)
        self._concurrency.answered()
        return answer

    async def _isolate(self, what: "_Try", error: RequestError) -> list[JSON]:
        """Find the row that makes a call fail, by halving the call; return the output rows.

        Rows with which engines were lost go one by one: each half that holds the cause would cost engines.
        """
        retryable = error.status in RETRYABLE and not error.final
        if not (
            retryable or error.final or error.status == 413 or (error.param or "").startswith(self._field)
        ):
            raise DriverError(f"the service refuses this run: {error.message}")
        if len(what.items) == 1:
            if retryable and self._stats.calls == what.answered:
                # No other call was answered meanwhile, so the service fails and not this row.
                raise _gave_up(what, error)
            (item,) = what.items
            return [item.failed(error.type, error.message, what.attempts)]
        if retryable and what.whole and self._stats.calls == what.answered:
            raise _gave_up(what, error)
        if error.final:
            return [row for one in what.rows() for row in await self._ask(one)]
        first, second = what.halves()
        try:
            rows = await self._ask(first)
        except GaveUpError:
            # If the other half is answered, the service works.
            rows = await self._ask(second)
            return await self._ask(first) + rows
        return rows + await self._ask(second)

    async def _wait(self, seconds: float) -> None:
        if await wait_for_event(self._stopping, seconds):
            raise StoppedError


def _rows(items: Sequence[Item], answer: JSON, attempts: int) -> list[JSON]:
    errors = {error["index"]: error for error in answer.get("errors") or ()}
    return [
        item.done(result, detail, attempts)
        if result is not None and detail is not None
        else item.failed(
            errors.get(index, {}).get("type", "internal_error"),
            errors.get(index, {}).get("message", "the service gave no result and no reason"),
            attempts,
        )
        for index, (item, result, detail) in enumerate(
            zip(items, answer["results"], answer["details"], strict=True)
        )
    ]
