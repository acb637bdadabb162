"""The runner: gives rows of batches and datasets places at the engines, sends rows, records results."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from serve_app.client import Backoff
from serve_app.rows.errors import RunError
from serve_app.rows.pacing import Auto, Concurrency, Rate
from serve_app.rows.places import Places, Run, TakenRow, Waits
from serve_app.rows.rows import Result, RowClient
from serve_app.rows.tries import Again, Sender

logger = logging.getLogger("ray.serve")

P = ParamSpec("P")
T = TypeVar("T")
Try = asyncio.Task[Result | Again | None]

Record = Callable[[Mapping[Run, Sequence[Result]]], None]
"""Records results of runs durably, all of them or none. Runs in a thread."""


@dataclass(slots=True, eq=False)
class ModelRows:
    """The rows of all runs at the engines of one model.

    Each model has a limit and places of its own, so that a slow or sleeping model holds up no run of another.

    Attributes:
        concurrency: Limit on the rows that have a place, and on each tenant's rows in flight.
        places: The places of the rows.
        sender: Sends the rows.
        pacing: The task that adapts the limit to the load of the engines, while rows are in flight.
    """

    concurrency: Concurrency
    places: Places
    sender: Sender
    pacing: asyncio.Task[None] | None = None


class Runner:
    """Sends the rows of runs, and records their results in groups.

    A host reads rows into the runs, and calls `fill` whenever something has changed. A try of a row is a
    task in the context of the runner; a row that waits for its next try has no task. A host leaves the
    context once no row is in flight; a cancellation ends the tries without results.

    Args:
        client: The engines.
        record: Records results. It raises a RunError if a run can't continue, an OSError if
            the same results are to be recorded again later.
        concurrency: Returns the limit on rows of a model that have a place, and on each tenant's rows in
            flight.
        backoff: Waits between the tries of a row.
        retries: Counted failures of a row before its last try; see `Sender`.
        patient: Whether an outage is waited out; see `Sender`.
        max_bytes: Most bytes of a model's input lines in flight, except for one line of each tenant.
        gather_s: Seconds for which results are gathered, to be recorded together.
        again_s: Seconds after which results that couldn't be recorded are recorded again.
        changed: Called when new work may begin.

    Attributes:
        rate: Rows that got their results here.
        failed: Rows whose results are errors.
    """

    def __init__(
        self,
        client: RowClient,
        record: Record,
        *,
        concurrency: Callable[[], Concurrency] = Auto,
        backoff: Backoff | None = None,
        retries: int = 8,
        patient: bool = True,
        max_bytes: int = 64 << 20,
        gather_s: float = 0.0,
        again_s: float = 1.0,
        changed: Callable[[], None],
    ) -> None:
        self.rate = Rate()
        self.failed = 0
        self._client = client
        self._record = record
        self._concurrency = concurrency
        self._backoff = backoff or Backoff()
        self._retries = retries
        self._patient = patient
        self._max_bytes = max_bytes
        self._gather_s = gather_s
        self._again_s = again_s
        self._changed = changed
        self._models: dict[str | None, ModelRows] = {}
        self._waits = Waits(changed)
        self._results: list[tuple[TakenRow, Result]] = []
        self._unwritten = False
        self._to_write = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._writing = self._group.create_task(self._write())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waits.close()
        if kind is None:
            # After an error, the group cancels its tasks itself.
            for task in [self._writing, *(model.pacing for model in self._models.values())]:
                if task is not None:
                    task.cancel()
        await self._group.__aexit__(kind, error, trace)

    @property
    def in_flight(self) -> int:
        """Rows that were taken and have no recorded result."""
        return sum(model.places.in_flight for model in self._models.values())

    @property
    def limit(self) -> int:
        """Rows that may have a place now, at the engines of all models that have had rows."""
        return sum(model.concurrency.limit for model in self._models.values())

    @property
    def retried(self) -> int:
        """Tries beyond the first try of each row."""
        return sum(model.sender.retried for model in self._models.values())

    @property
    def trouble(self) -> str:
        """Message of a failure after which no row of its model was answered; empty: no such failure."""
        return next((model.sender.trouble for model in self._models.values() if model.sender.trouble), "")

    def fill(self, base: str | None, runs: list[Run]) -> None:
        """Give the free places at the engines of a model to rows.

        Args:
            base: The model; None: the rows have several.
            runs: The next run of each tenant; each has rows, or rows whose next try is due.
        """
        if self._unwritten:
            # Rows in flight keep their places until their results can be recorded.
            return
        model = self._model(base)
        for taken in model.places.fill(runs):
            one = self._group.create_task(self._try(model, taken))
            taken.run.tries.add(one)
            # A task that is cancelled before its first step runs nothing of its own.
            one.add_done_callback(partial(self._tried, model, taken))
        if model.places.in_flight and (model.pacing is None or model.pacing.done()):
            model.pacing = self._group.create_task(self._pace(base, model))

    def stop(self, run: Run) -> None:
        """Stop sending rows of a run. Its tries in progress continue; `Run.abort` ends them too."""
        if run.stopping:
            return
        run.stopping = True
        places = self._model(run.base).places
        for taken in [*run.due, *self._waits.drop(run)]:
            places.leave(taken)
        run.due.clear()
        self._changed()

    def keep(self, tenants: set[str]) -> None:
        """Forget other tenants that have no row in flight."""
        for model in self._models.values():
            model.places.keep(tenants)

    def _model(self, base: str | None) -> ModelRows:
        """Return the rows of a model; None: the rows of runs with several models."""
        model = self._models.get(base)
        if model is None:
            concurrency = self._concurrency()
            places = Places(concurrency, self._max_bytes, self._changed)
            sender = Sender(self._client, concurrency, self._backoff, self._retries, self._patient)
            model = self._models[base] = ModelRows(concurrency, places, sender)
        return model

    async def _try(self, model: ModelRows, taken: TakenRow) -> Result | Again | None:
        try:
            return await model.sender.try_once(taken)
        except RunError as error:
            taken.run.fail(error)
            return None

    def _tried(self, model: ModelRows, taken: TakenRow, one: Try) -> None:
        """Decide what follows the end of a try."""
        run = taken.run
        run.tries.discard(one)
        found = None if one.cancelled() or one.exception() else one.result()
        if isinstance(found, Result):
            self._results.append((taken, found))
            self._to_write.set()
        elif isinstance(found, Again) and not run.stopping:
            model.places.wait(taken)
            self._waits.add(taken, found.wait_s)
        else:
            # The row is left to the end of the run, or to the next process.
            model.places.leave(taken)
            self._changed()

    async def _write(self) -> None:
        """Record results in groups: a group has the results of all runs since the group before."""
        while True:
            await self._to_write.wait()
            await asyncio.sleep(self._gather_s)
            self._to_write.clear()
            taken, self._results = self._results, []
            groups: dict[Run, list[Result]] = {}
            for one, result in taken:
                groups.setdefault(one.run, []).append(result)
            try:
                await finished(self._record, groups)
            except RunError as error:
                for run in groups:
                    run.fail(error)
            except OSError as error:
                logger.error("results can't be written, next try in %g s: %s", self._again_s, error)
                self._unwritten = True
                self._results[:0] = taken
                self._to_write.set()
                await asyncio.sleep(self._again_s)
                continue
            else:
                for run, results in groups.items():
                    run.recorded(results)
            self._unwritten = False
            for one, result in taken:
                self.failed += result.is_error
                self._model(one.run.base).places.leave(one)
            self.rate.add(len(taken))
            self._changed()

    async def _pace(self, base: str | None, model: ModelRows) -> None:
        """Adapt the number of rows at the engines of a model to their load, while rows are in flight."""
        while True:
            await asyncio.sleep(model.concurrency.interval_s)
            if not model.places.in_flight:
                return
            try:
                load = await self._client.load(base)
            except Exception as error:
                logger.debug("the load of the engines is not known: %r", error, exc_info=True)
                load = None
            # Rows count until their results are recorded: a slow disk records larger groups.
            if not self._unwritten:
                model.concurrency.observe(load, model.places.used)
            self._changed()


async def finished(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a writing function in a thread. The thread has ended when this call returns or is cancelled.

    Otherwise a slow thread would still write after the state is closed, into the results of the next process.
    """
    turn = threading.Lock()
    dropped = False

    def run() -> T:
        with turn:
            if dropped:
                raise RuntimeError("cancelled before it began")
            return function(*args, **kwargs)

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        # A thread that has begun holds the lock until its end.
        dropped = True
        await asyncio.to_thread(turn.acquire)
        raise
