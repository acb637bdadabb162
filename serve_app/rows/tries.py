"""One try of a row: sends the row, and decides whether the row has its result or is sent again."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from typing import Any, NamedTuple

from serve_app.api.errors import RequestError, internal_error
from serve_app.client import RETRYABLE, Backoff
from serve_app.ingress.body import look
from serve_app.rows.errors import GaveUpError
from serve_app.rows.pacing import Concurrency
from serve_app.rows.places import TakenRow
from serve_app.rows.rows import QuotaError, Result, RowAnswer, RowClient, RowRequest
from serve_app.system import cancellation

logger = logging.getLogger("ray.serve")

RECENT = 6
"""Last failures of a row that are compared: if other rows were answered between these failures, the row is
the cause, and not an outage."""

MOST_FAULTS = 3
"""Answers with the same fault of the service (500) after which the fault is the result of a row."""


class Again(NamedTuple):
    """A row is to be sent again.

    Attributes:
        wait_s: Seconds until the next try.
    """

    wait_s: float


class Sender:
    """Sends rows, and has all rules of their further tries.

    A refusal for lack of room (429) doesn't count: live traffic may fill the engines for hours. Another
    failure counts if the engine answered 500, or if other rows of the model were answered meanwhile, so that
    an outage doesn't cost rows. The third answer with the same 500 is the result of a row. A refusal by a
    quota concerns one tenant or key: it doesn't count, and doesn't lower the limit.

    An adapter that isn't served any more (404) is a failure that counts: an administrator replaces an adapter
    by an unload and a load. The client counts the engines that are lost with a row, over all its tries. There
    is no limit on the time of a row; the deadline of a run stops the run.

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

    async def try_once(self, taken: TakenRow) -> Result | Again | None:
        """Send a row once.

        Returns:
            Its result, or when it is to be sent again; None: its run has stopped.

        Raises:
            RunError: The run can't continue.
        """
        run, row = taken.run, taken.row
        if not taken.tries:
            taken.answered.append(self._answered[row.model])
        text = await look(len(row.text), lambda: run.body(row))
        if run.stopping:
            return None
        request = RowRequest(run.endpoint, text, run.scheduling, run.models, taken.lost)
        answer = await self._answer(self._client.send(request))
        # A row that has its answer keeps it, whatever ends its run.
        if (task := asyncio.current_task()) is not None:
            run.tries.discard(task)
        taken.tries += 1
        # A service that has answered no row may have another model than the rows name.
        unserved = answer.names_no_model and (self._patient or self._answered[row.model] > 0)
        if answer.final or not (unserved or answer.status in RETRYABLE):
            self._answered[row.model] += 1
            self._concurrency.answered()
            self.trouble = ""
        else:
            self.trouble = answer.message
            if answer.status == 429 or not self._is_last(taken, answer, unserved):
                taken.answered = [*taken.answered, self._answered[row.model]][-RECENT:]
                self.retried += 1
                return Again(self._backoff.wait_s(taken.tries, answer.retry_after_s))
        return await look(len(row.text), lambda: run.result(row, answer, taken.tries))

    def _is_last(self, taken: TakenRow, answer: RowAnswer, unserved: bool) -> bool:
        """Count a failure, and return whether it is the result of the row.

        Raises:
            GaveUpError: The service has failed too often, and the row isn't the cause.
        """
        before = taken.answered[-1 if self._patient else 0]
        works = self._answered[taken.row.model] > before
        # An engine that fails on each row is an outage too, until it has answered a row.
        fault = answer.status == 500 and (self._patient or self._answered.total() > 0)
        if fault:
            taken.faults[answer.message] += 1
        if fault or unserved or works or not self._patient:
            taken.failures += 1
        if taken.failures <= self._retries and taken.faults[answer.message] < MOST_FAULTS:
            return False
        if not (fault or unserved or works):
            raise GaveUpError(taken.tries, "a row", self.trouble)
        return True

    async def _answer(self, sending: Coroutine[Any, Any, RowAnswer]) -> RowAnswer:
        """Return the answer to a row; an error of the call is an answer too."""
        try:
            answer = await sending
        except asyncio.CancelledError:
            if cancellation.is_own():
                raise
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
        if answer.status == 429:
            self._concurrency.refused(answer.retry_after_s)
        return answer
