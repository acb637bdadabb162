"""Sends a row, and retries it until it has a final answer."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from serve_app.api.errors import RequestError, internal_error
from serve_app.client import RETRYABLE, Backoff
from serve_app.ingress.body import look
from serve_app.jobs.errors import GaveUpError
from serve_app.jobs.pacing import Concurrency
from serve_app.jobs.rows import QuotaError, Result, Row, RowAnswer, RowClient
from serve_app.jobs.scheduler import BatchRun
from serve_app.system import cancellation
from serve_app.system.waiting import wait_for_event

logger = logging.getLogger("ray.serve")

RECENT = 6
"""Last failures of a row: if other rows were answered between them, the row is the cause and not an
outage."""

MOST_FAULTS = 3
"""Answers with the same fault of the service (500) after which the fault is the result of a row."""

Away = Callable[[], AbstractAsyncContextManager[None]]
"""Returns the context in which a row waits for its next try."""


class Sender:
    """Sends rows.

    A refusal for lack of room (429) doesn't count: live traffic may fill the engines for hours. Another
    failure counts if the engine answered 500, or if other rows of the model were answered meanwhile, so that
    an outage doesn't cost rows. The same 500 is the result of a row at the third time. A refusal by a quota
    doesn't lower the limit either: it concerns one tenant or key.

    An adapter that isn't served any more (404) is a failure that counts: an administrator replaces an adapter
    by an unload and a load. There is no limit on the time of a row.

    Args:
        client: The engines.
        concurrency: Limit that adapts to answers and refusals.
        backoff: Waits between the tries of a row.
        retries: Counted failures after which a row is sent again; the next failure is its result.
        patient: Whether an outage of any length is waited out. Otherwise each failure counts, and a row that
            fails too often ends the run, unless other rows were answered between its last failures: then the
            service works, and the row is the cause.

    Attributes:
        retried: Number of tries after the first of a row.
        trouble: Message of the last failure; empty once a row was answered.
    """

    def __init__(
        self,
        client: RowClient,
        concurrency: Concurrency,
        backoff: Backoff,
        retries: int,
        patient: bool = True,
    ) -> None:
        self.retried = 0
        self.trouble = ""
        self._client = client
        self._concurrency = concurrency
        self._backoff = backoff
        self._retries = retries
        self._patient = patient
        self._answered: Counter[str | None] = Counter()

    async def send(self, run: BatchRun, row: Row, away: Away = nullcontext) -> Result | None:
        """Return the result of a row; None if its run stops first.

        Args:
            run: The row's batch or dataset.
            row: The row.
            away: Returns the context of each wait for the next try.

        Raises:
            RunError: The run can't continue.
        """
        model = row.model
        tries = failures = 0
        faults: Counter[str] = Counter()
        seen = deque([self._answered[model]], RECENT if not self._patient else 1)
        while not run.stopping.is_set():
            # Parsed for each try: a parsed row takes many times its bytes while it waits or is at an engine.
            body = await look(len(row.text), lambda: run.body(row))
            if run.stopping.is_set():
                return None
            sending = self._client.send(run.endpoint, body, run.scheduling, run.models)
            del body
            answer = await self._try(run, sending)
            if answer is None:
                return None
            tries += 1
            unserved = answer.names_no_model and (self._patient or self._answered[model] > 0)
            if answer.final or not (unserved or answer.status in RETRYABLE):
                self._answered[model] += 1
                self._concurrency.answered()
                self.trouble = ""
                return await self._result(run, row, answer, tries)
            self.trouble = answer.message
            if answer.status != 429:
                works = self._answered[model] > seen[0]
                # An engine that fails on each row is an outage too, until it has answered a row.
                fault = answer.status == 500 and (self._patient or self._answered.total() > 0)
                if fault:
                    faults[answer.message] += 1
                failures += not self._patient or fault or unserved or works
                if failures > self._retries or faults[answer.message] >= MOST_FAULTS:
                    if not (fault or unserved or works):
                        raise GaveUpError(tries, "a row", self.trouble)
                    return await self._result(run, row, answer, tries)
            seen.append(self._answered[model])
            self.retried += 1
            async with away():
                await wait_for_event(run.stopping, self._backoff.wait_s(tries, answer.retry_after_s))
        return None

    async def _try(self, run: BatchRun, sending: Coroutine[Any, Any, RowAnswer]) -> RowAnswer | None:
        """Return the answer to a row; None: the end of the run ended the try."""
        # A separate task: the end of a run cancels it, and nothing else of the row.
        task = asyncio.create_task(sending)
        run.tries.add(task)
        try:
            answer = await task
        except asyncio.CancelledError:
            if cancellation.is_own():
                raise
            if run.stopping.is_set():
                return None
            answer = RowAnswer.of(RequestError(503, "service_unavailable", "the call was cancelled"))
        except QuotaError as error:
            # Other tenants still have quota, and the engines have room for them.
            return RowAnswer.of(error)
        except RequestError as error:
            answer = RowAnswer.of(error)
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
            answer = RowAnswer.of(RequestError(503, "service_unavailable", message))
        except Exception as error:
            logger.exception("a row failed by a fault of the service")
            answer = RowAnswer.of(internal_error(error))
        finally:
            run.tries.discard(task)
        if answer.status == 429:
            self._concurrency.refused(answer.retry_after_s)
        return answer

    async def _result(self, run: BatchRun, row: Row, answer: RowAnswer, tries: int) -> Result:
        return await look(len(row.text), lambda: run.result(row, answer, tries))
