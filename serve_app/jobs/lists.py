"""Rows of `/generate` in lists: one call has several rows, and each row gets its own answer."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.client import RETRYABLE
from serve_app.jobs.pacing import EngineLoad
from serve_app.jobs.rows import RowAnswer, RowClient

GATHER_S = 0.005
"""Seconds for which a list waits for more rows: rows that get places together are sent within this time."""

FIELDS = ("prompts", "messages")
"""The fields of a call that have a value for each row."""

Send = Callable[..., Awaitable[RowAnswer]]
"""Sends a body, and returns its answer."""

PER_ROW = ("results", "details")
"""The fields of an answer that have a value for each row."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A row that waits for its list, and for its answer."""

    body: JSON
    answer: "asyncio.Future[RowAnswer]"


class Lists:
    """A client that gathers rows into calls.

    A row is a call of `/generate` with one prompt or one chat, `details` and `partial`. The sender handles
    single rows: it gets the answer that a call with only this row would have.

    The failure of a list says nothing about a single row. So its rows are sent alone: from the next try on,
    or at once if another try of the list is useless, and one after the other if engines were lost with the
    list. The rows of a call that finds no room (429) stay together. A refusal that names no row is the answer
    to each row.

    Args:
        client: The engines.
        size: Most rows of a call.
        gather_s: Seconds for which a list waits for more rows.
    """

    def __init__(self, client: RowClient, size: int, gather_s: float = GATHER_S) -> None:
        self._client = client
        self._size = size
        self._gather_s = gather_s
        self._gathered: dict[bytes, list[_Waiting]] = {}
        self._alone: set[bytes] = set()
        self._suspects = asyncio.Lock()
        self._calls: set[asyncio.Task[None]] = set()

    async def send(
        self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None = None
    ) -> RowAnswer:
        """Send a row in a list, and return its answer."""
        alone = partial(self._send_alone, endpoint, body, scheduling, models)
        row = _hash(body)
        if row in self._alone:
            answer = await alone()
            if answer.final or answer.status not in RETRYABLE:
                self._alone.discard(row)
            return answer
        answer, rows = await self._together(endpoint, body, scheduling, models)
        if answer.status in (200, 429) or rows == 1:
            return answer
        if answer.final:
            # Each of the rows may be the one that crashes engines.
            async with self._suspects:
                return await alone()
        if answer.status in RETRYABLE:
            self._alone.add(row)
            return answer
        return await alone() if answer.is_of_rows(*FIELDS) else answer

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return the load of the engines."""
        return await self._client.load(base)

    async def _send_alone(
        self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None
    ) -> RowAnswer:
        answer = await self._client.send(endpoint, body, scheduling, models)
        return _split(answer, 1)[0] if answer.status == 200 else answer

    async def _together(
        self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None
    ) -> tuple[RowAnswer, int]:
        """Return the answer to a row that is sent in a list, and the number of rows in the list."""
        # `task_id` only distinguishes rows.
        shared = {name: value for name, value in body.items() if name not in (*FIELDS, "task_id")}
        key = _hash([shared, [name for name in FIELDS if name in body]])
        loop = asyncio.get_running_loop()
        one = _Waiting(body, loop.create_future())
        rows = self._gathered.setdefault(key, [])
        rows.append(one)
        send = partial(self._client.send, endpoint, scheduling=scheduling, models=models)
        if len(rows) == self._size:
            self._flush(key, rows, send)
        elif len(rows) == 1:
            loop.call_later(self._gather_s, self._flush, key, rows, send)
        return await one.answer, len(rows)

    def _flush(self, key: bytes, rows: list[_Waiting], send: Send) -> None:
        """Send a list, unless it has been sent already."""
        if self._gathered.get(key) is not rows:
            return
        del self._gathered[key]
        rows[:] = [one for one in rows if not one.answer.done()]
        if not rows:
            return
        call = asyncio.ensure_future(_call(rows, send))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

        def given_up(_: object) -> None:
            if all(one.answer.cancelled() for one in rows):
                call.cancel()

        for one in rows:
            one.answer.add_done_callback(given_up)


async def _call(rows: list[_Waiting], send: Send) -> None:
    """Send a list, and give each row its answer."""
    field = next(name for name in FIELDS if name in rows[0].body)
    body = rows[0].body | {field: [one.body[field][0] for one in rows]}
    try:
        answer = await send(body)
        answers = _split(answer, len(rows)) if answer.status == 200 else [answer] * len(rows)
    except RequestError as error:
        answers = [RowAnswer.of(error)] * len(rows)
    except Exception as error:
        # The sender of each row handles it.
        for one in rows:
            if not one.answer.done():
                one.answer.set_exception(error)
        return
    for one, own in zip(rows, answers, strict=True):
        if not one.answer.done():
            one.answer.set_result(own)


def _split(answer: RowAnswer, rows: int) -> list[RowAnswer]:
    """Return the answer of each row of a list."""
    lists = [answer.body.get(name) for name in PER_ROW]
    if any(not isinstance(values, list) or len(values) != rows for values in lists):
        count = len(lists[0]) if isinstance(lists[0], list) else 0
        message = f"an answer with {count} results for {rows} prompts"
        return [RowAnswer.of(RequestError(502, "service_unavailable", message))] * rows
    errors: dict[int, JSON] = {error["index"]: error for error in answer.body.get("errors") or ()}
    found = []
    for index, (result, detail) in enumerate(zip(*lists, strict=True)):
        body: JSON = {"results": [result], "details": [detail]}
        if index in errors:
            body["errors"] = [errors[index] | {"index": 0}]
        found.append(RowAnswer(200, body))
    return found


def _hash(value: Any) -> bytes:
    return blake2b(to_json(value), digest_size=16).digest()
