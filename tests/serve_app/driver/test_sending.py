"""One chunk, sent until each row has a result or a final error."""

import asyncio

import httpx
import pytest
from starlette.responses import Response

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import DriverError, RowError
from serve_app.driver.chunks import Chunk, Item
from serve_app.driver.clients import HTTPClient
from serve_app.driver.run_stats import RunStats
from serve_app.driver.sending import GaveUpError, Sender, StoppedError
from serve_app.jobs.pacing import Backoff, Fixed
from tests.progress import STILL_S
from tests.serve_app.driver.fake import FakeService, failure, texts

CHUNK: Chunk = [Item(number, number, f"p{number}") for number in range(5)]


def sender(service: FakeService, retries: int = 3, wait_s: float = 0.0001) -> tuple[Sender, RunStats]:
    stats = RunStats()
    return (
        Sender(
            HTTPClient("http://fake", transport=httpx.ASGITransport(app=service.app)),
            {"max_tokens": 4},
            chat=False,
            retries=retries,
            backoff=Backoff(wait_s, wait_s),
            concurrency=Fixed(1),
            stats=stats,
            stopping=asyncio.Event(),
        ),
        stats,
    )


async def test_a_chunk_is_one_call_and_rows_without_a_prompt_are_not_sent() -> None:
    service = FakeService()
    one, stats = sender(service)
    rows = await one.send([*CHUNK[:2], Item(2, "x", RowError("invalid_row", "no"))])
    assert [row["result"] for row in rows] == ["P0", "P1", None]
    assert rows[2]["error"] == {"type": "invalid_row", "message": "no"}
    (body,) = service.calls
    assert (body["prompts"], body["max_tokens"], body["task_id"]) == (["p0", "p1"], 4, "rows_0_1")
    assert (stats.calls, stats.retries, stats.in_flight) == (1, 0, 0)


async def test_a_call_is_retried_until_it_is_answered() -> None:
    service = FakeService()
    troubles = [failure(503), failure(429)]
    service.trouble = lambda body: troubles.pop() if troubles else None
    one, stats = sender(service)
    rows = await one.send(CHUNK)
    assert [row["attempts"] for row in rows] == [3] * 5
    assert len(service.calls) == 3
    assert stats.retries == 2
    assert stats.trouble == ""


async def test_one_row_that_fails_is_found_by_halving() -> None:
    service = FakeService()

    def trouble(body: JSON) -> Response | None:
        return failure(400, param="prompts[0]") if "p3" in texts(body) else None

    service.trouble = trouble
    rows = await sender(service)[0].send(CHUNK)
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["row"] for row in rows if row["error"]] == [3]


async def test_a_row_that_engines_are_lost_with_is_found_by_sending_each_alone() -> None:
    service = FakeService()

    def trouble(body: JSON) -> Response | None:
        if "p3" not in texts(body):
            return None
        response = failure(500)
        response.headers["x-should-retry"] = "false"
        return response

    service.trouble = trouble
    rows = await sender(service)[0].send(CHUNK)
    assert [row["row"] for row in rows if row["error"]] == [3]
    assert [row["result"] for row in rows] == ["P0", "P1", "P2", None, "P4"]
    assert [texts(body) for body in service.calls if "p3" in texts(body)] == [
        [f"p{number}" for number in range(5)],
        ["p3"],
    ]


async def test_a_service_that_fails_every_call_ends_the_run() -> None:
    service = FakeService()
    service.trouble = lambda body: failure(503)
    with pytest.raises(GaveUpError, match="run the same command again"):
        await sender(service, retries=1)[0].send(CHUNK)


async def test_an_error_of_the_call_itself_ends_the_run_without_a_retry() -> None:
    service = FakeService()
    service.trouble = lambda body: failure(400, param="max_tokens")
    with pytest.raises(DriverError, match="refuses this run"):
        await sender(service)[0].send(CHUNK)
    assert len(service.calls) == 1


async def test_stopping_ends_the_wait_for_the_next_try() -> None:
    service = FakeService()
    service.trouble = lambda body: failure(503)
    one, stats = sender(service, wait_s=600.0)
    sending = asyncio.ensure_future(one.send(CHUNK))
    async with asyncio.timeout(STILL_S):
        while not stats.trouble:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        one._stopping.set()
        with pytest.raises(StoppedError):
            await sending
