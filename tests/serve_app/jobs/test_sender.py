"""A row until its final answer."""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic_core import from_json

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.client import Backoff
from serve_app.ingress.body import LARGE_BYTES
from serve_app.jobs import rows
from serve_app.jobs.batches import OpenBatch
from serve_app.jobs.pacing import Auto, Fixed
from serve_app.jobs.rows import QuotaError, Row, RowAnswer
from serve_app.jobs.sender import Sender
from tests.progress import STILL_S
from tests.serve_app.jobs.engine import Served
from tests.serve_app.jobs.helpers import batch_of, row, text_of

BATCH = batch_of("b", "in")
ROW = Row(1, text_of(row("x")))


class Script(Served):
    """A client with answers that are told before."""

    def __init__(self, *answers: RowAnswer | Exception) -> None:
        self._answers = list(answers)

    async def send(
        self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None = None
    ) -> RowAnswer:
        """Return the next answer."""
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Waits(Backoff):
    """Waits that take no time, and are noted."""

    def wait_s(self, failures: int, retry_after_s: float | None = None) -> float:
        """Note a wait."""
        noted.append((failures, retry_after_s))
        return 0.0


noted: list[tuple[int, float | None]] = []


async def test_retry_after_is_kept() -> None:
    noted.clear()
    full = RequestError(429, "rate_limit_error", "full", retry_after_s=7.0)
    client = Script(RowAnswer(429, {}, 5.0), full, ConnectionError("reset"), RowAnswer(200, {"ok": True}))
    sender = Sender(client, Fixed(1), Waits(), 0)
    result = await sender.send(OpenBatch(BATCH), ROW)
    assert result is not None
    assert not result.is_error
    assert noted == [(1, 5.0), (2, 7.0), (3, None)]


async def test_a_final_error_is_not_tried_again() -> None:
    poison = RequestError(503, "service_unavailable", "it ended three engines", final=True)
    for answer in (poison, RowAnswer(503, {}, final=True)):
        result = await Sender(Script(answer), Fixed(1), Backoff(), 8).send(OpenBatch(BATCH), ROW)
        assert result is not None
        assert result.is_error


async def test_a_row_is_away_while_it_waits_for_a_try() -> None:
    waiting = 0

    @asynccontextmanager
    async def away() -> AsyncGenerator[None, None]:
        nonlocal waiting
        waiting += 1
        yield
        waiting -= 1

    one = OpenBatch(BATCH)
    sender = Sender(Script(RowAnswer(503, {})), Fixed(1), Backoff(3600.0, 3600.0), 0)
    sending = asyncio.create_task(sender.send(one, ROW, away))
    for _ in range(10):
        await asyncio.sleep(0)
    assert waiting == 1
    one.stopping.set()
    assert await sending is None
    assert waiting == 0


async def test_a_refusal_by_an_engine_lowers_the_limit_unlike_a_quota_s() -> None:
    noted.clear()
    refused = QuotaError(429, "rate_limit_error", "none left", retry_after_s=36_000.0)
    limit = Auto(first=8)
    sender = Sender(Script(refused, RowAnswer(200, {})), limit, Waits(), 0)
    assert await sender.send(OpenBatch(BATCH), ROW) is not None
    assert (limit.limit, noted) == (8, [(1, 36_000.0)])
    sender = Sender(Script(RowAnswer(429, {}), RowAnswer(200, {})), limit, Waits(), 0)
    assert await sender.send(OpenBatch(BATCH), ROW) is not None
    assert limit.limit == 4


async def test_a_large_row_is_read_and_answered_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Body(dict[str, Any]):
        """A body that can be watched."""

    class Taking(Script):
        """A client that needs a row for a moment."""

        async def send(
            self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None = None
        ) -> RowAnswer:
            """Forget the row, and answer once it is gone."""
            loop, gone = asyncio.get_running_loop(), asyncio.Event()
            # The thread that has read it holds it until it gets a core.
            watched = weakref.ref(body, lambda _: loop.call_soon_threadsafe(gone.set))
            del body
            async with asyncio.timeout(STILL_S):
                await gone.wait()
            forgotten.append(watched() is None)
            return RowAnswer(200, {})

    forgotten: list[bool] = []
    threads = set()

    def parsed(text: bytes) -> JSON:
        threads.add(threading.get_ident())
        found: JSON = from_json(text)
        return found | {"body": Body(found["body"])}

    monkeypatch.setattr(rows, "from_json", parsed)
    monkeypatch.setattr(Row, "body", lambda self: parsed(self.text)["body"])
    large = Row(1, text_of(row("x", body={"model": "demo", "prompt": "x" * LARGE_BYTES})))
    result = await Sender(Taking(), Fixed(1), Backoff(), 0).send(OpenBatch(BATCH), large)
    assert result is not None
    assert forgotten == [True]
    assert threading.get_ident() not in threads


async def test_a_row_has_no_result_once_it_is_stopped() -> None:
    one = OpenBatch(BATCH)
    one.stopping.set()
    sender = Sender(Script(), Fixed(1), Backoff(), 0)
    assert await sender.send(one, ROW) is None
