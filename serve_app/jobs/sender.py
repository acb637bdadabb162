"""Sends a row until it has an answer that is final."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from serve_app.api.errors import RequestError, internal_error
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling
from serve_app.ingress.body import look
from serve_app.jobs.models import Batch
from serve_app.jobs.pacing import RETRYABLE, Backoff, Concurrency
from serve_app.jobs.rows import Answer, Client, QuotaError, Result, Row, answered
from serve_app.jobs.scheduler import OpenBatch
from serve_app.system import cancellation
from serve_app.system.waiting import wait_for_event

logger = logging.getLogger("ray.serve")

Away = Callable[[], AbstractAsyncContextManager[None]]
"""Returns the context in which a row waits for its next try."""


class Sender:
    """Sends rows.

    A refusal for lack of room (429) doesn't count: live traffic may fill the engines for hours. Another
    failure counts if the engine said that it failed (500), or if other rows of the model were answered
    meanwhile, so that an outage doesn't cost rows. A refusal by a quota doesn't lower the limit either: it
    concerns one tenant or key.

    Args:
        client: The engines.
        concurrency: Limit that adapts to answers and refusals.
        backoff: Waits between the tries of a row.
        retries: Failures that count before the last one is a row's result.
        timeout_s: Seconds after which a try has failed.
    """

    def __init__(
        self, client: Client, concurrency: Concurrency, backoff: Backoff, retries: int, timeout_s: float
    ) -> None:
        self._client = client
        self._concurrency = concurrency
        self._backoff = backoff
        self._retries = retries
        self._timeout_s = timeout_s
        self._answered: Counter[str | None] = Counter()

    async def send(self, one: OpenBatch, row: Row, away: Away = nullcontext) -> Result | None:
        """Return the result of a row; None if it has none when its batch stops.

        Args:
            one: Its batch.
            row: The row.
            away: Returns the context of each wait for the next try.
        """
        batch, stopping = one.batch, one.stopping
        scheduling = Scheduling(TIER_PRIORITY["flex"], batch.tenant, weight=batch.weight, key=batch.api_key)
        model = row.model
        tries = failures = 0
        seen = self._answered[model]
        while not stopping.is_set():
            # Parsed for each try: what waits, or is at an engine, takes many times its bytes otherwise.
            body = await look(len(row.text), row.body)
            if stopping.is_set():
                return None
            sending = self._client.send(batch.endpoint, body, scheduling, batch.rights.get("models"))
            del body
            answer = await self._try(one, sending)
            if answer is None:
                return None
            if answer.final or answer.status not in RETRYABLE:
                self._answered[model] += 1
                self._concurrency.answered()
                return await self._result(batch, row, answer)
            tries += 1
            if answer.status != 429 and (answer.status == 500 or self._answered[model] > seen):
                failures += 1
                if failures > self._retries:
                    return await self._result(batch, row, answer)
            seen = self._answered[model]
            async with away():
                await wait_for_event(stopping, self._backoff.wait_s(tries, answer.retry_after_s))
        return None

    async def _try(self, one: OpenBatch, sending: Coroutine[Any, Any, Answer]) -> Answer | None:
        """Return the answer to a row; None: the try was ended with its batch."""
        # A task of its own: the end of a batch cancels it, and nothing else of the row.
        task = asyncio.create_task(sending)
        one.tries.add(task)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await task
        except asyncio.CancelledError:
            if cancellation.is_own():
                raise
            if one.stopping.is_set():
                return None
            answer = _failed(RequestError(503, "service_unavailable", "the call was cancelled"))
        except QuotaError as error:
            # Others have quota still, and the engines have room for them.
            return _failed(error)
        except RequestError as error:
            answer = _failed(error)
        except TimeoutError:
            answer = _failed(RequestError(504, "timeout_error", f"no answer in {self._timeout_s:g} s"))
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
            answer = _failed(RequestError(503, "service_unavailable", message))
        except Exception as error:
            logger.exception("batches: a row failed by a fault of the service")
            answer = _failed(internal_error(error))
        finally:
            one.tries.discard(task)
        if answer.status == 429:
            self._concurrency.refused(answer.retry_after_s)
        return answer

    async def _result(self, batch: Batch, row: Row, answer: Answer) -> Result:
        return await look(len(row.text), lambda: answered(batch.id, row, answer.status, answer.body))


def _failed(error: RequestError) -> Answer:
    return Answer(error.status, error.body(), error.retry_after_s, error.final)
