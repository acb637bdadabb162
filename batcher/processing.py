"""One batch through `process_fn`: who is still wanted, who gets which result, who is to blame."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from batcher.admission import LATE
from batcher.calls import ProcessCall
from batcher.entries import Ticket
from batcher.errors import Aborted, BadResults, Expired, fit, separate
from batcher.observations import BatchObservation, Observation, Outcome
from batcher.stats import BatchRecorder

ResultT = TypeVar("ResultT")


class Processor(Generic[ResultT]):
    """Runs batches of tickets and ends each ticket.

    Args:
        call: Calls `process_fn`.
        splits: Whether a batch that fails is run again in halves, to find the culprit.
        recorder: Where batches and records are counted.
        clock: The batcher's clock.
    """

    def __init__(
        self,
        call: ProcessCall[Any, ResultT],
        splits: bool,
        recorder: BatchRecorder,
        clock: Callable[[], float],
    ) -> None:
        self._call = call
        self._splits = splits
        self._recorder = recorder
        self._clock = clock

    async def run(self, batch: list[Ticket[ResultT]], leave: Callable[[], None]) -> None:
        """Process a batch; if it fails, its halves, and so on.

        Args:
            batch: The tickets.
            leave: Called when `process_fn` won't be called again, before the last tickets end: so the
                next batch can start before the callers of this one take the event loop.
        """
        parts = deque((batch,))
        # An outage fails every part there is: no need to ask for each record.
        failures_left = 2 * len(batch).bit_length() + 1
        try:
            while parts:
                part = self._still_wanted(parts.popleft())
                if not part:
                    continue
                started = self._clock()
                results: Sequence[ResultT] = ()
                failure: Exception | None = None
                try:
                    results = await self._call([ticket.record for ticket in part])
                except Exception as error:
                    failure = error
                self._count_batch(part)
                if failure is None:
                    failures_left = 2 * len(batch)
                elif len(part) > 1 and failures_left and self._splits and not isinstance(failure, BadResults):
                    failures_left -= 1
                    middle = len(part) // 2
                    parts += (part[:middle], part[middle:])
                    continue
                if not parts:
                    leave()
                self._count_records(part, started, None if failure else results)
                if failure is None:
                    self._resolve(part, results)
                else:
                    self.reject(part, failure)
        except BaseException as cause:
            self.reject(batch, Aborted(f"the batch was cut short by {cause!r}"))
            raise
        finally:
            leave()

    def reject(self, tickets: list[Ticket[ResultT]], error: Exception) -> None:
        """Fail those tickets that have not ended, each with an error object of its own."""
        for ticket in tickets:
            if not ticket.done():
                self._recorder.failed += 1
                ticket.fail(error)
                error = separate(error)

    def _still_wanted(self, part: list[Ticket[ResultT]]) -> list[Ticket[ResultT]]:
        """Return the tickets that were not cancelled; end those that come too late."""
        now = self._clock()
        for ticket in part:
            if ticket.deadline is not None and ticket.deadline <= now and not ticket.done():
                self._recorder.expired += 1
                ticket.fail(Expired(LATE))
        return [ticket for ticket in part if not ticket.done()]

    def _count_batch(self, part: list[Ticket[ResultT]]) -> None:
        recorder = self._recorder
        costs = [ticket.cost for ticket in part]
        recorder.batches += 1
        recorder.batch_records += len(part)
        recorder.batch_cost += sum(costs)
        recorder.padded_cost += max(costs) * len(part)
        if recorder.observations is not None:
            recorder.observations.batches.append(BatchObservation(len(part), sum(costs)))

    def _count_records(
        self, part: list[Ticket[ResultT]], started: float, results: Sequence[ResultT] | None
    ) -> None:
        recorder = self._recorder
        waits = [started - ticket.submitted_at for ticket in part]
        run = self._clock() - started
        recorder.ran += len(part)
        recorder.run_s += run * len(part)
        recorder.latency_s += sum(waits) + run * len(part)
        recorder.waits += waits
        recorder.runs += [run] * len(part)
        if (observations := recorder.observations) is not None:
            for index, (ticket, wait) in enumerate(zip(part, waits, strict=True)):
                outcome: Outcome = "completed"
                if ticket.cancelled():
                    outcome = "cancelled"
                elif results is None or isinstance(results[index], BaseException):
                    outcome = "failed"
                observations.records.append(
                    Observation(ticket.tenant, ticket.priority, ticket.cost, wait, run, outcome)
                )

    def _resolve(self, part: list[Ticket[ResultT]], results: Sequence[ResultT]) -> None:
        completed = cost = 0
        seen: set[int] = set()
        for ticket, result in zip(part, results, strict=True):
            if ticket.done():
                continue
            if isinstance(result, BaseException):
                self._recorder.failed += 1
                ticket.fail(separate(result) if id(result) in seen else fit(result))
                seen.add(id(result))
            else:
                completed += 1
                cost += ticket.cost
                ticket.record = None
                ticket.set_result(result)
        self._recorder.completed += completed
        self._recorder.completed_cost += cost
