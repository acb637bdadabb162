"""A run: sends the rows of a dataset through a service, and records the results.

A thread reads ahead by up to a window of rows. When the rows of the previous window are sent, the rows read
so far are put in order: rows that share a prefix are sent together, as in a batch (`serve_app.jobs.plan`).
"""

import asyncio
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any, Literal

import msgspec
from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling, ServiceTier
from serve_app.client import RETRYABLE, Backoff
from serve_app.dataset.errors import CommandError, MissingColumnError, OutputError, RowError, gave_up
from serve_app.dataset.formats import InputRow, numbered
from serve_app.dataset.prompts import Prompter, plain
from serve_app.dataset.readers import open_source, values_of
from serve_app.dataset.stats import Measured, RowService, RunStats
from serve_app.jobs.plan import TOGETHER, InputLine, Planner, Target, Turns
from serve_app.rows.errors import GaveUpError, RunError
from serve_app.rows.pacing import Auto, Concurrency, Fixed
from serve_app.rows.places import Run
from serve_app.rows.rows import Result, Row, RowAnswer, RowTokens
from serve_app.rows.runner import Runner, finished
from serve_app.system.cancellation import wait_for_event

ENDPOINT = "/generate"

WINDOW = 50_000, 128 << 20
"""Most rows that are read ahead and put in order together, and most bytes of their prompts."""

FIRST_S, SILENT_S = 10.0, 0.3
"""Seconds in which the first window fills: for files, and for a pipe, which may stay silent."""

LOW_ROWS = 64
"""Number of ready rows below which more are made ready."""

SLICE_ROWS = 256
"""Rows that are made ready at once."""

CHECKED_ROWS = 50
"""Number of the first rows of which at least one must have the columns that the prompt needs."""

ASKED_ROWS = 1_000
"""Rows in one query of the output for rows that are done."""

GATHER_S = 0.05
"""Seconds for which results are gathered: committing one result takes nearly as long as committing many."""

READY_GROUPS = 8
"""Groups of results that wait for the caller of `run`."""

MOST_ROWS = 1024
"""Most rows at the service at once, if the number adapts to the service."""

TICK_S = 0.5

Record = Callable[[Sequence[Result]], None]
Done = Callable[[int, int], set[int]]
"""Takes the numbers of a first and a last row, and returns which rows in this range are done."""


@dataclass(slots=True, frozen=True)
class Item:
    """One row to send.

    Attributes:
        number: Number of its row.
        id: The row's id for its user; None: its position in the input.
        prompt: A text, the messages of a chat, or the error of a row without a prompt.
    """

    number: int
    id: Any
    prompt: str | list[JSON] | RowError

    @classmethod
    def of(cls, row: InputRow, prompter: Prompter, id_column: str) -> "Item":
        """Return a row of the input in the form in which it is sent."""
        id = plain(row.values.get(id_column))
        if isinstance(id, float) and not isfinite(id):
            # NaN stands for a missing value in many tools, and is no JSON.
            id = None
        elif not isinstance(id, str | int | float | None):
            id = str(id)
        try:
            return cls(row.number, id, prompter.prompt(row.values))
        except RowError as error:
            return cls(row.number, id, error)


def check_columns(items: Iterable[Item]) -> None:
    """Raise a CommandError if all rows lack a column: the command names a wrong column."""
    missing = None
    for item in items:
        if isinstance(item.prompt, MissingColumnError):
            missing = missing or item.prompt
        elif not (isinstance(item.prompt, RowError) and item.prompt.type == "invalid_row"):
            return
    if missing:
        raise CommandError(f"the first rows fail: {missing.message}. {missing.fix}")


class ReadAhead:
    """Reads rows in a thread, within bounds on rows and bytes.

    Args:
        rows: The rows.
        done: Returns which rows are done; done rows are left out.
        changed: Called in the thread when rows were read.
        window: Most rows, and most bytes of their prompts.

    Attributes:
        read: Number of rows that were read, including rows that are left out.
        ended: Whether all rows were read.
    """

    def __init__(
        self,
        rows: Iterator[Item],
        done: Done,
        changed: Callable[[], None],
        window: tuple[int, int] = WINDOW,
    ) -> None:
        self.read = 0
        self.ended = False
        self._rows = rows
        self._done = done
        self._changed = changed
        self._most_rows, self._most_bytes = window
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._closed = False
        self._room = threading.Condition()
        # A daemon thread, since it may still wait for a silent pipe when the run is over.
        self._thread = threading.Thread(target=self._run, name="read", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> bool:
        """True while the thread reads; the thread may wait for its input then."""
        return self._thread.is_alive() and not self.full

    @property
    def full(self) -> bool:
        """True if a window is full, or nothing more follows."""
        many = len(self._items) >= self._most_rows or self._bytes >= self._most_bytes
        return many or self.ended or self._error is not None

    def __len__(self) -> int:
        """Return the number of rows that can be taken."""
        return len(self._items)

    def take(self, first: bool = False) -> list[Item]:
        """Return the rows that were read, and make room for others.

        Args:
            first: Whether this is the first call: an error of the input comes before any row is sent.

        Raises:
            RunError: The input can't be read further; all earlier rows were taken, unless `first`.
        """
        with self._room:
            items = [item for item, _ in self._items]
            self._items.clear()
            self._bytes = 0
            self._room.notify()
            if (first or not items) and self._error is not None:
                raise self._error
        return items

    def close(self) -> None:
        """Stop reading."""
        with self._room:
            self._closed = True
            self._room.notify()

    def _run(self) -> None:
        known: set[int] = set()
        last = -1
        try:
            for item in self._rows:
                self.read += 1
                if item.number > last:
                    last = item.number + ASKED_ROWS - 1
                    known = self._done(item.number, last)
                if item.number in known:
                    continue
                size = 0 if isinstance(item.prompt, RowError) else len(to_json(item.prompt))
                with self._room:
                    self._room.wait_for(lambda: self._closed or not self.full)
                    if self._closed:
                        return
                    self._items.append((item, size))
                    self._bytes += size
                    tell = len(self._items) == 1 or self.full
                if tell:
                    self._changed()
            self.ended = True
        except Exception as error:
            # The run raises the error once the rows before it are sent.
            self._error = error
        self._changed()


_PARTS = msgspec.json.Decoder(tuple[msgspec.Raw, msgspec.Raw])
"""The id and the prompt of a row as it waits."""


class DatasetRun(Run):
    """The rows of a dataset.

    Args:
        fields: Fields of every call, without the prompt.
        chat: Whether prompts are lists of messages.
        tier: Service tier of the calls.
        write: Records results.
        stats: Counts the results.

    Attributes:
        failure: The error that ended the run; None: no error.
    """

    def __init__(
        self, fields: Mapping[str, Any], chat: bool, tier: ServiceTier, write: Record, stats: RunStats
    ) -> None:
        super().__init__(ENDPOINT, Scheduling(TIER_PRIORITY[tier]))
        self.failure: RunError | None = None
        self._field = "messages" if chat else "prompts"
        shared = to_json({**fields, "service_tier": tier, "partial": True, "details": True})
        self._start = b'%b,"%b":' % (shared[:-1], self._field.encode())
        self._write = write
        self._stats = stats

    def __str__(self) -> str:
        return "the run"

    def row(self, item: Item) -> Row:
        """Return a row in the form in which it waits."""
        return Row(item.number, to_json([item.id, item.prompt], inf_nan_mode="null"))

    def prompts(self, item: Item) -> JSON:
        """Return the field of a call with one prompt."""
        return {self._field: [item.prompt]}

    def body(self, row: Row) -> bytes:
        """Return a call with one prompt."""
        return self.call(row.line, b"[%b]" % _PARTS.decode(row.text)[1])

    def call(self, number: int, prompts: bytes) -> bytes:
        """Return a call whose first row has this number, with a list of prompts."""
        return b'%b%b,"task_id":"row_%d"}' % (self._start, prompts, number)

    def result(self, row: Row, answer: RowAnswer, tries: int) -> Result:
        """Return the row of the output.

        Raises:
            RunError: The service refuses all rows.
        """
        id = from_json(bytes(_PARTS.decode(row.text)[0]))
        if answer.status != 200:
            if not (answer.is_of_rows(self._field) or answer.final or answer.status in RETRYABLE):
                raise RunError(f"the service refuses this run: {answer.message}")
            return _failed(
                row.line, id, str(answer.error.get("type", "internal_error")), answer.message, tries
            )
        result, detail = (_only(answer.body.get(name)) for name in ("results", "details"))
        if result is None or detail is None:
            (error, *_) = answer.body.get("errors") or [{}]
            message = error.get("message", "the service gave no result and no reason")
            return _failed(row.line, id, error.get("type", "internal_error"), message, tries)
        read, written = detail["prompt_tokens"], detail["completion_tokens"]
        line = {
            "row": row.line,
            "id": id,
            "result": result,
            "finish_reason": detail["finish_reason"],
            "prompt_tokens": read,
            "completion_tokens": written,
            "attempts": tries,
            "error": None,
        }
        return Result(row.line, to_json(line) + b"\n", False, tokens=RowTokens(read or 0, 0, written or 0))

    def record(self, results: Sequence[Result]) -> None:
        """Record rows of the output."""
        self._write(results)

    def recorded(self, results: Sequence[Result]) -> None:
        """Count rows."""
        self._stats.add(results)

    def fail(self, error: RunError) -> None:
        """Keep an error with which the run ends: rows in flight are finished, if they can be written."""
        self.failure = self.failure or error
        if isinstance(error, OutputError):
            self.abort()


def _only(values: Any) -> Any:
    """Return the only item of a list; None if the list is of another form."""
    return values[0] if isinstance(values, list) and len(values) == 1 else None


def unsent(item: Item) -> Result | None:
    """Return the result of a row without a prompt, which isn't sent; None: the row has a prompt."""
    if not isinstance(error := item.prompt, RowError):
        return None
    return _failed(item.number, item.id, error.type, error.message, 0)


def _failed(number: int, id: Any, type: str, message: str, tries: int) -> Result:
    line = {
        "row": number,
        "id": id,
        "result": None,
        "finish_reason": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "attempts": tries,
        "error": {"type": type, "message": message},
    }
    return Result(number, to_json(line, inf_nan_mode="null") + b"\n", True)


class Drive:
    """Drives one run over a dataset to its end.

    Args:
        rows: The input.
        prompter: Makes prompts of its rows.
        service: The service.
        fields: Sampling fields and the model of each call.
        tier: Service tier of the calls; "flex" goes behind live traffic.
        write: Records results.
        done: Returns which rows are done.
        before: Number of rows that earlier runs have done.
        concurrency: Calls at once; "auto" adapts to the service.
        retries: Further tries of a row.
        id_column: Column of a row's id.
        limit: Number of rows to take, from the beginning.
        backoff: Waits between tries.
        observed: Whether the statistics of the service are read.
        gather_s: Seconds for which results are gathered, to be recorded together.
        silent: Whether the input may stay silent without end, like a pipe.
        window: Bounds of the rows that are read ahead; see `ReadAhead`.

    Attributes:
        stats: Statistics of the run.
        concurrency: Limit on the rows in flight.
    """

    def __init__(
        self,
        rows: Iterable[InputRow],
        prompter: Prompter,
        service: RowService,
        fields: Mapping[str, Any],
        write: Record,
        *,
        tier: ServiceTier = "flex",
        done: Done = lambda first, last: set(),
        before: int = 0,
        concurrency: int | Literal["auto"] = "auto",
        retries: int = 20,
        id_column: str = "id",
        limit: int | None = None,
        backoff: Backoff | None = None,
        observed: bool = True,
        gather_s: float = GATHER_S,
        silent: bool = False,
        window: tuple[int, int] = WINDOW,
    ) -> None:
        self.stats = RunStats()
        self._observed = observed
        self._gather_s = gather_s
        self._window_bounds = window
        self._first_s = SILENT_S if silent else FIRST_S
        self.concurrency: Concurrency = Auto(most=MOST_ROWS) if concurrency == "auto" else Fixed(concurrency)
        self._items = (Item.of(row, prompter, id_column) for row in islice(rows, limit))
        self._run = DatasetRun(fields, prompter.chat, tier, write, self.stats)
        self._measured = Measured(service, self.stats)
        self._done = done
        self._check = not before
        self._retries = retries
        self._backoff = backoff
        self._changed = asyncio.Event()
        self._stopping = False
        self._turns: Turns | None = None
        self._window: list[Row] = []
        self._reading: ReadAhead | None = None

    @property
    def read(self) -> int:
        """Rows of the input that were read."""
        return 0 if self._reading is None else self._reading.read

    @property
    def asleep(self) -> bool:
        """True if the model has no replica, as of the last statistics."""
        return self._measured.asleep

    @property
    def silent(self) -> bool:
        """True while a thread may wait for the input."""
        return self._reading is not None and self._reading.silent

    def stop(self) -> None:
        """Stop sending rows; rows in flight are finished."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Run to the end.

        Raises:
            RunError: No row could be served, the input can't be read, or the output can't be written.
        """
        loop = asyncio.get_running_loop()

        def tell() -> None:
            # The loop may be closed by then.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._changed.set)

        run = self._run
        self._reading = ReadAhead(self._items, self._done, tell, self._window_bounds)
        if self._observed:
            await self._measured.load(None)
        try:
            async with Runner(
                self._measured,
                lambda results: run.record(results[run]),
                concurrency=lambda: self.concurrency,
                backoff=self._backoff,
                retries=self._retries,
                patient=False,
                gather_s=self._gather_s,
                changed=self._changed.set,
            ) as runner:
                await self._loop(runner, run, self._reading)
                self.stats.end()
        finally:
            self._reading.close()
        if run.failure is not None:
            if isinstance(run.failure, GaveUpError):
                raise gave_up(run.failure)
            raise run.failure
        if self._observed:
            await self._measured.load(None)

    async def _loop(self, runner: Runner, run: DatasetRun, reading: ReadAhead) -> None:
        while True:
            self._changed.clear()
            if self._stopping or run.failure is not None:
                runner.stop(run)
            more = not run.stopping
            if more and len(run.rows) < LOW_ROWS:
                try:
                    more = await self._make_ready(runner, run, reading)
                except RunError as error:
                    run.fail(error)
                    continue
            if not run.stopping and (run.rows or run.due):
                runner.fill(None, [run])
            self.stats.follow(runner)
            if not runner.in_flight and (run.stopping or not (more or run.rows)):
                return
            await wait_for_event(self._changed, TICK_S)

    async def _make_ready(self, runner: Runner, run: DatasetRun, reading: ReadAhead) -> bool:
        """Make rows ready to be sent; return whether more may follow.

        Raises:
            RunError: The input can't be read, or the output can't be written.
        """
        if not self._turns:
            if self._check and len(reading):
                await self._fill(reading)
            # `ended` is read before `take`: the thread may add its last rows in between.
            ended = reading.ended
            if not (window := reading.take(first=self._turns is None)):
                return not ended
            if self._check:
                check_columns(window[:CHECKED_ROWS])
                self._check = False
            if failed := [result for item in window if (result := unsent(item))]:
                await finished(run.record, failed)
                run.recorded(failed)
            sound = [item for item in window if not isinstance(item.prompt, RowError)]
            self._window, turns = await asyncio.to_thread(_planned, sound, run)
            self._turns = turns
        numbers, take = self._turns.peek(max(1, runner.in_flight // TOGETHER), SLICE_ROWS)
        take()
        run.rows.extend(self._window[number] for number in numbers)
        return True

    async def _fill(self, reading: ReadAhead) -> None:
        """Let the first window fill for a moment."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._first_s
        while not reading.full and not self._stopping and (left := deadline - loop.time()) > 0:
            self._changed.clear()
            await wait_for_event(self._changed, left)
        self._changed.set()


def _planned(items: Sequence[Item], run: DatasetRun) -> tuple[list[Row], Turns]:
    """Return rows in the form in which they wait, and the order in which they are sent."""
    planner = Planner()
    turns = array("I", bytes(4 * len(items)))
    rows = [run.row(item) for item in items]
    for number, (item, row) in enumerate(zip(items, rows, strict=True)):
        planner.add(InputLine(number, row.text, 0), run.prompts(item), Target(ENDPOINT, None))
    plan = planner.finish()
    for number, entry in enumerate(plan):
        turns[entry.turn] = number
    return rows, Turns(plan, turns)


async def run(
    dataset: str | Iterable[Mapping[str, Any] | str],
    client: RowService,
    *,
    prompts: Prompter | None = None,
    sampling: Mapping[str, Any] | None = None,
    model: str | None = None,
    service_tier: ServiceTier = "flex",
    concurrency: int | Literal["auto"] = "auto",
    retries: int = 20,
    id_column: str = "id",
    limit: int | None = None,
    backoff: Backoff | None = None,
) -> AsyncIterator[JSON]:
    """Send a dataset through a service and yield an output row for each of its rows.

    Rows are yielded in the order in which they end; `row` is the number of the input row.

    Args:
        dataset: Rows as mappings or as bare prompts, or an input as on the command line: a path, a pattern,
            a URI.
        client: The service.
        prompts: Makes prompts from rows; by default the column `prompt` is the prompt.
        sampling: Sampling fields of `/generate`.
        model: Id of the model; may be left out if only one is served.
        service_tier: Tier of the calls; "flex" goes behind live traffic.
        concurrency: Concurrent calls; "auto" adapts to the service.
        retries: Most retries of a row.
        id_column: Column of a row's id.
        limit: Number of rows to take, from the beginning.
        backoff: Waits between tries.

    Raises:
        RunError: No row could be served, or the input can't be read.
    """
    source = open_source(dataset) if isinstance(dataset, str) else None
    rows = numbered(values_of(source) if source else map(_columns, dataset))
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[Sequence[Result]] = asyncio.Queue(READY_GROUPS)

    def write(results: Sequence[Result]) -> None:
        # The run waits for a caller that is slow to take rows.
        asyncio.run_coroutine_threadsafe(ready.put(results), loop).result()

    drive = Drive(
        rows,
        prompts or Prompter(),
        client,
        call_fields(sampling or {}, model),
        write,
        tier=service_tier,
        concurrency=concurrency,
        retries=retries,
        id_column=id_column,
        limit=limit,
        backoff=backoff,
        silent=source is None or source.silent,
    )
    driving = asyncio.create_task(drive.run())
    try:
        while not (driving.done() and ready.empty()):
            taking = asyncio.create_task(ready.get())
            await asyncio.wait([taking, driving], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                continue
            for result in taking.result():
                row = from_json(result.text)
                yield row if row["id"] is not None else row | {"id": row["row"]}
        await driving
    finally:
        driving.cancel()
        while not driving.done():
            # A thread may wait for room in the queue.
            while not ready.empty():
                ready.get_nowait()
            await asyncio.wait([driving], timeout=TICK_S / 10)


def call_fields(sampling: Mapping[str, Any], model: str | None) -> JSON:
    """Return the fields of every call of a run, without the prompt and the tier."""
    fields: JSON = plain(dict(sampling))
    return fields if model is None else fields | {"model": model}


def _columns(row: Mapping[str, Any] | str) -> JSON:
    return {"prompt": row} if isinstance(row, str) else dict(row)
