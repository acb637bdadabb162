"""Sends a row until it has an answer that is final."""

import asyncio
from collections import Counter
from contextlib import suppress

from serve_app.api.errors import RequestError
from serve_app.api.pacing import RETRYABLE, Backoff, Concurrency
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling
from serve_app.batches.client import Answer, Client
from serve_app.batches.rows import Result, Row, answered
from serve_app.batches.stored import Batch


class Sender:
    """Sends rows.

    A refusal for lack of room (429) doesn't count: live traffic may fill the engines for hours. Another
    failure counts if the engine said that it failed (500), or if other rows of the model were answered
    meanwhile, so that an outage doesn't cost rows.

    Args:
        client: The engines.
        concurrency: Limit that adapts to answers and refusals.
        backoff: Waits between the tries of a row.
        retries: Failures that count before the last one is a row's result.
        timeout_s: Seconds after which a try has failed.

    Attributes:
        waiting: Rows that wait for their next try.
    """

    def __init__(
        self, client: Client, concurrency: Concurrency, backoff: Backoff, retries: int, timeout_s: float
    ) -> None:
        self.waiting = 0
        self._client = client
        self._concurrency = concurrency
        self._backoff = backoff
        self._retries = retries
        self._timeout_s = timeout_s
        self._answered: Counter[str | None] = Counter()

    async def send(self, batch: Batch, row: Row, stopping: asyncio.Event) -> Result | None:
        """Return the result of a row; None if it has none when `stopping` is set."""
        body = row.body()
        model = body.get("model")
        scheduling = Scheduling(TIER_PRIORITY["flex"], batch.tenant, weight=batch.weight, key=batch.api_key)
        tries = failures = 0
        seen = self._answered[model]
        while not stopping.is_set():
            answer = await self._try(batch.endpoint, body, scheduling)
            if answer.final or answer.status not in RETRYABLE:
                self._answered[model] += 1
                self._concurrency.answered()
                return answered(batch.id, row, answer.status, answer.body)
            tries += 1
            if answer.status == 429:
                self._concurrency.refused(answer.retry_after_s)
            elif answer.status == 500 or self._answered[model] > seen:
                failures += 1
                if failures > self._retries:
                    return answered(batch.id, row, answer.status, answer.body)
            seen = self._answered[model]
            await self._wait(stopping, self._backoff.wait_s(tries, answer.retry_after_s))
        return None

    async def _try(self, endpoint: str, body: JSON, scheduling: Scheduling) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._client.send(endpoint, body, scheduling)
        except RequestError as error:
            failed = error
        except TimeoutError:
            failed = RequestError(504, "timeout_error", f"no answer in {self._timeout_s:g} s")
        except Exception as error:
            failed = RequestError(503, "service_unavailable", f"{type(error).__name__}: {error}")
        return Answer(failed.status, failed.body(), failed.retry_after_s, failed.final)

    async def _wait(self, stopping: asyncio.Event, seconds: float) -> None:
        self.waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await stopping.wait()
        finally:
            self.waiting -= 1
