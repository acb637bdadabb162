"""The FunctionEngine deployment: a model that is a function of a batch, and its batcher."""

import asyncio
import importlib
import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from batcher import DynamicBatcher, Entry
from serve_app.api.embeddings import embedding_response, parse_embedding
from serve_app.api.errors import RequestError
from serve_app.api.facts import NOTHING
from serve_app.api.protocol import JSON, ProcessRequest, parse_process
from serve_app.api.routes import EMBEDDINGS, PROCESS
from serve_app.engine.answer import Answer
from serve_app.engine.batch_call import BatchCall, run_records
from serve_app.engine.job import Job
from serve_app.engine.replica import DRAIN_S, Replica
from serve_app.quotas.client import Handle
from serve_app.settings.models import FunctionSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.telemetry import SILENT, TelemetrySettings
from serve_app.settings.usage import NO_USAGE, UsageSettings
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import Outcome, Usage

RESULTS_PER_TURN = 32
"""Results that are written as JSON before other tasks get their turn on the event loop."""


class FunctionEngine(Replica):
    """One copy of a model that is a function: an object with `process(batch)`, and its batcher.

    The object is built once, in the constructor. Its `process` takes a list of records and returns as
    many results; it runs in a thread unless it is `async def`. It may have `estimate_cost(record)`, which
    returns the cost of a record, and `check_health()`, which raises when it can't go on.

    Args:
        settings: The model.
        max_records: Maximum records that one call may carry.
        telemetry: What is measured and logged.
        usage: Accounting of the calls, and the quotas of tenants.
        quotas: The handle of the Quotas deployment; None: there is none.

    Raises:
        SettingsError: There is no such class, it doesn't take the options, or it has no `process`.
    """

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self,
        settings: FunctionSettings,
        max_records: int,
        telemetry: TelemetrySettings = SILENT,
        usage: UsageSettings = NO_USAGE,
        quotas: Handle | None = None,
    ) -> None:
        self._open(settings.id, telemetry, usage, quotas)
        self._max_records = max_records
        self._model = _build(settings)
        self._batcher: DynamicBatcher[Any, Any] = DynamicBatcher(
            self._model.process,
            cost_estimator=getattr(self._model, "estimate_cost", None),
            **settings.batcher.arguments(),
        )
        await self._batcher.start()
        self._observe(telemetry, self._batcher)

    async def process(self, request: ProcessRequest | JSON) -> JSON:
        """Process a list of records.

        Args:
            request: A `ProcessRequest`, or an object with its fields.

        Returns:
            What `POST /process` answers: `results` in the order of the records, `task_id`, and with
            `partial` the `errors`.

        Raises:
            RequestError: The request is wrong, can't be served now, or the function failed on a record.
        """
        if not isinstance(request, ProcessRequest):
            request = parse_process(request, max_records=self._max_records)
        scheduling = request.scheduling()
        job = self._job(RelayRequest("POST", PROCESS, b"", [], b"", scheduling, source="handle"))
        with self._accounted(job):
            if self._limited(job):
                await self._reserve(job)
            return await self._process(request, job)

    async def stats(self) -> JSON:
        """Return the batcher's statistics, the rates, and the usage since the start."""
        return self._entry()

    async def check_health(self) -> None:
        """Raise if the batcher has stopped or the object says that it can't go on."""
        if not self._batcher.is_running:
            raise RuntimeError("the batcher has stopped")
        if check := getattr(self._model, "check_health", None):
            if inspect.iscoroutinefunction(check):
                await check()
            else:
                # It may block, for instance to ask a device.
                await asyncio.to_thread(check)

    async def __del__(self) -> None:
        if batcher := getattr(self, "_batcher", None):
            await batcher.stop(timeout=DRAIN_S)
        await self._close()

    def _job(self, request: RelayRequest) -> Job:
        # Records are no tokens: a call counts as one request.
        return Job(replace(request, facts=NOTHING))

    async def _answer(self, job: Job, answer: Answer) -> None:
        body = job.request.body
        if job.request.path == EMBEDDINGS:
            texts = parse_embedding(body, max_texts=self._max_records)
            call = BatchCall("input", partial=False)
            tickets = await self._run(texts.input, job, call)
            vectors = [ticket.result() for ticket in tickets if ticket is not None]
            response = embedding_response(texts, self._id, vectors, job.usage.cost)
            answer.complete(await _json(response, "data"))
        else:
            records = parse_process(body, max_records=self._max_records)
            answer.complete(await _json(await self._process(records, job), "results"))

    async def _process(self, request: ProcessRequest, job: Job) -> JSON:
        call = BatchCall("records", partial=request.partial)
        tickets = await self._run(request.records, job, call)
        response: JSON = {
            "results": [None if ticket is None else ticket.result() for ticket in tickets],
            "task_id": request.task_id,
        }
        if call.errors is not None:
            response["errors"] = [error.model_dump() for error in call.errors]
        return response

    async def _run(self, records: Sequence[Any], job: Job, call: BatchCall) -> list[Entry[Any] | None]:
        """Run the records of a call, and count the cost of the records with a result."""
        began = time.monotonic()
        outcome: Outcome = "failed"
        try:
            tickets = await run_records(self._batcher, records, job.scheduling, call)
            outcome = "ok"
            return tickets
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            done = [ticket for ticket in call.tickets if ticket is not None and _has_result(ticket)]
            if done:
                cost = sum(ticket.cost for ticket in done)
                # The time in the engine is that from the submission: a batch has a wait as a whole.
                job.usage.add(Usage(began, began, time.monotonic(), outcome=outcome, cost=cost))


def _has_result(ticket: Entry[Any]) -> bool:
    return ticket.done() and not ticket.cancelled() and ticket.exception() is None


def _build(settings: FunctionSettings) -> Any:
    """Build the object that a target names.

    Raises:
        SettingsError: It can't be imported, doesn't take the options, or has no `process`.
    """
    where = f"models[{settings.id}]"
    module, _, name = settings.target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{where}.target: {settings.target} can't be imported: {error}") from error
    try:
        inspect.signature(kind).bind(**settings.options)
    except TypeError as error:
        raise SettingsError(f"{where}.options: {settings.target} doesn't take them: {error}") from None
    except ValueError:
        # A constructor of C tells no signature.
        pass
    model = kind(**settings.options)
    if not callable(getattr(model, "process", None)):
        raise SettingsError(f"{where}.target: {settings.target} has no method process(batch)")
    return model


async def _json(response: JSON, field: str) -> bytes:
    """Return an answer as JSON, written in parts: vectors for thousands of texts take seconds.

    Args:
        response: The answer.
        field: Its results, however many; they are taken as they are written.
    """
    results = iter(response[field])
    parts = []
    while some := list(islice(results, RESULTS_PER_TURN)):
        parts.append(_dump(some)[1:-1])
        await asyncio.sleep(0)
    written = {name: _dump(value) for name, value in response.items() if name != field}
    written[field] = b"[" + b",".join(parts) + b"]"
    return b"{" + b",".join(_dump(name) + b":" + written[name] for name in response) + b"}"


def _dump(value: Any) -> bytes:
    try:
        return json.dumps(value, default=_plain, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        message = f"The model's results can't be written as JSON: {error}"
        raise RequestError(500, "internal_error", message) from error


def _plain(value: Any) -> Any:
    """Return an array or a tensor as lists."""
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    raise TypeError(f"{type(value).__name__} is no JSON")
