"""Moves batches through their states: validation, rows, results, end. Warns of batches that will be late."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from serve_app.api.errors import RequestError
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling
from serve_app.jobs.content import Contents
from serve_app.jobs.errors import ContentLostError, NotFoundError, StateError
from serve_app.jobs.intake import UNKNOWN_MODEL, batch_error, check
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.lines import answered, body_of
from serve_app.jobs.models import Batch
from serve_app.jobs.plan import TOGETHER, Unsent
from serve_app.jobs.storage import close, give_up, remove_expired, unsent
from serve_app.jobs.store import Store
from serve_app.rows.errors import RunError
from serve_app.rows.pacing import Clock
from serve_app.rows.places import Run
from serve_app.rows.rows import Result, Row, RowAnswer, RowClient
from serve_app.rows.runner import Runner, finished
from serve_app.system.cancellation import wait_for_event
from serve_app.system.database import DatabaseError

logger = logging.getLogger("ray.serve")

KEY_ENDED = {"removed": "was removed", "disabled": "is disabled", "expired": "has expired"}
"""Ends of an API key, in words."""

LOW_ROWS = 64
"""Rows in memory below which more are read."""

KEY_GONE_S = 5.0
"""Seconds after which an invalid key ends its batches: an editor may write the keys file in two steps, and
the Ingress may read it before this process."""

MINUTE_S, HOUR_S = 60.0, 3600.0
"""Seconds after which a rate is known, and over which it is measured."""

TIDY_S = 600.0
"""Seconds between two deletions of expired files and batches."""


class RowRate:
    """Rows per second of a tenant for a model, over the last hour in which the tenant had rows to send.

    Attributes:
        rows: Rows so far.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._worked_s = 0.0
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])

    def work(self, seconds: float) -> None:
        """Count seconds in which rows were to be sent."""
        self._worked_s += seconds
        if self._worked_s - self._marks[-1][0] >= MINUTE_S:
            self._marks.append((self._worked_s, self.rows))
        while self._worked_s - self._marks[0][0] > HOUR_S:
            self._marks.popleft()

    @property
    def per_s(self) -> float | None:
        """The rate; None: not known yet. Without rows it is known after an hour: engines may start."""
        since_s, before = self._marks[0]
        seconds, rows = self._worked_s - since_s, self.rows - before
        return rows / seconds if seconds >= (MINUTE_S if rows else HOUR_S - MINUTE_S) else None


class BatchClient(RowClient, Protocol):
    """A client that knows the models and adapters of a service."""

    async def refresh(self, wake: bool = False) -> Collection[str]:
        """Read which adapters are served now.

        Args:
            wake: Have a replica started of each model whose adapters are not known yet.

        Returns:
            The models whose adapters are not known yet: no replica has answered since this process started.
        """

    def base_of(self, model: str) -> str | None:
        """Return the model whose engines run a model or an adapter; None: it isn't served now."""


class OpenBatch(Run):
    """A batch that hasn't ended, with its state in memory.

    Args:
        batch: Its stored state.

    Attributes:
        unsent: The rows that aren't read; None: not determined yet.
        read: Whether all rows were read.
        busy: Whether other work than rows is in progress: validation, reading, the end.
        keyless_since: When its API key was first seen to be invalid; None: the key is valid.
        lost: Message about content that is gone, so that the batch fails; empty: no content is gone.
        rate: Counts the rows of its tenant for its model.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch.endpoint, _scheduling(batch), batch.rights.get("models"))
        self._batch = batch
        self.unsent: Unsent | None = None
        self.read = False
        self.busy = False
        self.keyless_since: float | None = None
        self.lost = ""
        self.rate = RowRate()

    def __str__(self) -> str:
        return self.batch.id

    @property
    def batch(self) -> Batch:
        """The stored batch; only the store has its current counts."""
        return self._batch

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self._batch = batch
        self.scheduling = _scheduling(batch)
        self.models = batch.rights.get("models")

    @property
    def exhausted(self) -> bool:
        """True once all rows were taken."""
        return self.read and not self.rows

    @property
    def takes_rows(self) -> bool:
        """True while rows may be sent, and their results recorded."""
        return self.batch.state == "in_progress" and not self.stopping

    def body(self, row: Row) -> bytes:
        """Return the body to send, in the tier of batches."""
        return body_of(row)

    def result(self, row: Row, answer: RowAnswer, tries: int) -> Result:
        """Return the line of the output or the error file."""
        return answered(self.batch.id, row, answer.status, answer.body)

    def recorded(self, results: Sequence[Result]) -> None:
        """Count rows that have their results."""
        self.rate.rows += len(results)

    def fail(self, error: RunError) -> None:
        """Let the batch fail when its rows in flight have ended."""
        self.lost = self.lost or str(error)


def _scheduling(batch: Batch) -> Scheduling:
    return Scheduling(TIER_PRIORITY["flex"], batch.tenant, weight=batch.weight, key=batch.api_key)


class BatchRunner:
    """Runs all open batches of a store.

    Batches of a tenant for one model run in the order of their deadlines; the next batch begins when all rows
    of the batch before are taken. Taken rows stay where they are when a batch with an earlier deadline comes.
    Batches for different models run side by side. Batches with several models count as batches of one further
    model. A `Runner` sends the rows.

    Args:
        store: The state.
        content: The contents.
        client: The engines.
        rules: Models and limits of the batches, by the keys that created them.
        tick_s: Seconds between two looks at deadlines, and until failed work is tried again.
        key_gone_s: Seconds after which an invalid key ends its batches.
        clock: Seconds since the epoch.
        options: Limits of the rows; see `Runner`.

    Attributes:
        rows: Sends the rows.
        warnings: Messages about batches that will not end within their windows, by id.
    """

    def __init__(
        self,
        store: Store,
        content: Contents,
        client: BatchClient,
        rules: KeyRules,
        *,
        tick_s: float = 1.0,
        key_gone_s: float = KEY_GONE_S,
        clock: Clock = time.time,
        **options: Any,
    ) -> None:
        self._changed = asyncio.Event()
        self.rows = Runner(client, self._record, changed=self._changed.set, again_s=tick_s, **options)
        self.warnings: dict[str, str] = {}
        self._store = store
        self._content = content
        self._client = client
        self._rules = rules
        self._tick_s = tick_s
        self._key_gone_s = key_gone_s
        self._clock = clock
        self._open: dict[str, OpenBatch] = {}
        self._rates: dict[tuple[str | None, str], RowRate] = {}
        self._looked_at = clock()
        self._told: set[str] = set()
        self._stale = True
        self._stopping = False
        self._group = asyncio.TaskGroup()

    def notice(self) -> None:
        """Have the store read again: a batch was added or cancelled."""
        self._stale = True
        self._changed.set()

    def stop(self) -> None:
        """Stop sending rows. `run` returns when the rows in flight are recorded."""
        self._stopping = True
        for one in self._open.values():
            self.rows.stop(one)
        self._changed.set()

    async def run(self) -> None:
        """Run batches until `stop` is called.

        If `run` is cancelled instead, the next run sends the rows in flight again.
        """
        async with asyncio.TaskGroup() as self._group, self.rows:
            tidying = self._group.create_task(self._tidy())
            while not self._stopping or self.rows.in_flight or any(one.busy for one in self._open.values()):
                self._changed.clear()
                if self._stale:
                    await self._look()
                if not self._stopping:
                    self._step()
                await self._wait()
            tidying.cancel()

    async def _wait(self) -> None:
        # Work that was begun runs first.
        await asyncio.sleep(0)
        if not await wait_for_event(self._changed, self._tick_s):
            self._stale = True

    async def _look(self) -> None:
        """Read the open batches. A batch that was busy meanwhile has its state from its own work."""
        self._stale = False
        busy = {id for id, one in self._open.items() if one.busy}
        try:
            batches = await asyncio.to_thread(self._store.open_batches)
        except DatabaseError as error:
            logger.warning("batches: the database can't be read: %s", error)
            return
        found = {}
        for batch in sorted(batches, key=lambda batch: batch.expires_at):
            one = found[batch.id] = self._open.get(batch.id) or OpenBatch(batch)
            if batch.id not in busy:
                one.batch = batch
        self._open = found
        tenants = {batch.tenant for batch in batches}
        self.rows.keep(tenants)
        self._warn()

    def _warn(self) -> None:
        """Find the batches that end too late at the rate of their tenant; each is logged once.

        A batch waits for the batches of its tenant and model with earlier deadlines.
        """
        now = self._clock()
        passed_s, self._looked_at = max(0.0, now - self._looked_at), now
        ahead: Counter[tuple[str | None, str]] = Counter()
        warnings = {}
        for one in self._open.values():
            batch, turn = one.batch, (one.base, one.tenant)
            if batch.state != "in_progress":
                continue
            one.rate = self._rates.setdefault(turn, RowRate())
            if turn not in ahead:
                one.rate.work(passed_s)
            ahead[turn] += batch.total - batch.completed - batch.failed
            rate, left_s = one.rate.per_s, max(0.0, batch.expires_at - now)
            if rate is None or ahead[turn] <= rate * left_s:
                continue
            warnings[batch.id] = (
                "This batch will end after its completion_window: "
                f"{ahead[turn]} rows are left, with the rows of your batches for this model that go before, "
                f"{rate:.3g} of them ended per second in the last hour, "
                f"and the window ends in {left_s / HOUR_S:.1f} h. Cancel a batch that can wait"
            )
            if batch.id not in self._told:
                logger.warning("%s: %s", batch.id, warnings[batch.id])
        self.warnings = warnings
        self._told = self._told & self._open.keys() | warnings.keys()
        self._rates = {turn: rate for turn, rate in self._rates.items() if turn in ahead}

    def _step(self) -> None:
        """Begin all work that can begin now."""
        heads: dict[tuple[str | None, str], OpenBatch] = {}
        # A taken row goes before rows that aren't taken, even before rows of an earlier batch.
        due: dict[tuple[str | None, str], OpenBatch] = {}
        for one in self._open.values():
            if not one.in_flight:
                # An adapter may move to another model. Rows in flight keep their places at the old model.
                one.base = self._client.base_of(one.batch.model) if one.batch.model else None
            state, turn = one.batch.state, (one.base, one.batch.tenant)
            if one.lost or state in ("finalizing", "cancelling") or self._clock() >= one.batch.expires_at:
                self.rows.stop(one)
                one.abort()
            gone_s = self._keyless_s(one)
            if gone_s is None:
                if one.takes_rows and not one.exhausted:
                    heads.setdefault(turn, one)
                if one.due:
                    due.setdefault(turn, one)
            if one.busy:
                continue
            if gone_s is not None and gone_s >= self._key_gone_s:
                self._begin(one, self._cancel)
            elif state == "validating" and not one.lost:
                if gone_s is None:
                    self._begin(one, self._validate)
            elif one.stopping or one.exhausted:
                if not one.in_flight:
                    self._begin(one, self._end)
            elif heads.get(turn) is one and not one.read and len(one.rows) < LOW_ROWS:
                self._begin(one, self._read)
        ready: dict[str | None, list[Run]] = {}
        for (base, _), one in (heads | due).items():
            if one.due or one.rows:
                ready.setdefault(base, []).append(one)
        for base, runs in ready.items():
            self.rows.fill(base, runs)

    def _keyless_s(self, one: OpenBatch) -> float | None:
        """Return the seconds since the key of a batch became invalid; None: valid, or no longer needed."""
        open = one.batch.state in ("validating", "in_progress") and not one.stopping
        if not open or (one.exhausted and not one.in_flight) or not self._rules.ended(one.batch.api_key):
            one.keyless_since = None
            return None
        if one.keyless_since is None:
            one.keyless_since = self._clock()
        return self._clock() - one.keyless_since

    def _begin(self, one: OpenBatch, work: Callable[[OpenBatch], Awaitable[None]]) -> None:
        one.busy = True
        self._group.create_task(self._do(one, work))

    async def _do(self, one: OpenBatch, work: Callable[[OpenBatch], Awaitable[None]]) -> None:
        try:
            await work(one)
        except ContentLostError as error:
            one.lost = str(error)
        except (StateError, NotFoundError, RequestError) as error:
            # Since the store was read, the batch was cancelled, or ended and was deleted, or its key is gone.
            logger.info("%s: %r", one.batch.id, error)
        except OSError as error:
            logger.error("%s: next try in %g s: %s", one.batch.id, self._tick_s, error)
            await asyncio.sleep(self._tick_s)
        finally:
            one.busy = False
            self.notice()

    async def _validate(self, one: OpenBatch) -> None:
        batch = one.batch
        starting = await self._client.refresh()
        rights = batch.rights or self._rules.rights(batch.api_key)
        models = self._rules.models(rights)
        plan = await asyncio.to_thread(self._store.plan, batch.input_file)
        errors = await asyncio.to_thread(check, plan, batch.endpoint, models, rights["max_lines"])
        unknown = any(error["code"] == UNKNOWN_MODEL for error in errors)
        if unknown and starting and not one.stopping:
            # After a restart, an adapter that was loaded while the service ran isn't known at once.
            logger.info("%s waits for the adapters of %s, which has not answered", batch.id, starting)
            await self._client.refresh(wake=True)
            await asyncio.sleep(self._tick_s)
        elif errors:
            await asyncio.to_thread(self._store.end, batch.id, "failed", self._now(), errors)
        else:
            one.batch = await asyncio.to_thread(
                self._store.move,
                batch.id,
                "in_progress",
                self._now(),
                total=len(plan),
                model=plan.model,
            )

    async def _cancel(self, one: OpenBatch) -> None:
        """Cancel a batch whose key is no longer valid."""
        batch = one.batch
        if (what := self._rules.ended(batch.api_key)) is None:
            return
        message = f"The API key {batch.api_key!r}, which created this batch, {KEY_ENDED[what]}"
        errors = [batch_error(f"api_key_{what}", message)]
        logger.info("%s: %s", batch.id, message)
        one.batch = await asyncio.to_thread(
            self._store.move, batch.id, "cancelling", self._now(), errors=errors
        )

    async def _read(self, one: OpenBatch) -> None:
        if one.unsent is None:
            one.unsent = await asyncio.to_thread(unsent, self._store, one.batch)
        groups = max(1, one.in_flight // TOGETHER)
        one.rows.extend(await asyncio.to_thread(one.unsent.take, self._content, groups))
        if not one.unsent:
            # All rows are read, so the plan may leave the memory.
            one.read, one.unsent = True, None

    async def _end(self, one: OpenBatch) -> None:
        """End a batch with nothing in flight."""
        one.rows.clear()
        batch = one.batch
        if one.lost:
            await finished(give_up, self._store, self._content, batch.id, one.lost, self._now())
            return
        if batch.state == "in_progress":
            one.batch = await asyncio.to_thread(self._store.move, batch.id, "finalizing", self._now())
        batch = await asyncio.to_thread(self._store.batch, batch.id)
        await finished(close, self._store, self._content, batch, self._now())

    def _record(self, results: Mapping[Run, Sequence[Result]]) -> None:
        self._store.record({str(run): group for run, group in results.items()})

    async def _tidy(self) -> None:
        while True:
            try:
                limits = self._rules.common
                await asyncio.to_thread(remove_expired, self._store, self._content, self._now(), limits)
            except OSError as error:
                logger.error("expired files and batches can't be deleted: %s", error)
            await asyncio.sleep(TIDY_S)

    def _now(self) -> int:
        return int(self._clock())
