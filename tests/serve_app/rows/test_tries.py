"""One try of a row, and what follows from its answer."""

import threading

from serve_app.api.errors import RequestError
from serve_app.client import Backoff
from serve_app.ingress.body import LARGE_BYTES
from serve_app.jobs.batches import OpenBatch
from serve_app.rows.pacing import Auto, Fixed
from serve_app.rows.places import TakenRow
from serve_app.rows.rows import QuotaError, Result, Row, RowAnswer, RowRequest
from serve_app.rows.tries import Again, Sender
from tests.serve_app.jobs.engine import Served
from tests.serve_app.jobs.helpers import batch_of, row, text_of

BATCH = batch_of("b", "in")
ROW = Row(1, text_of(row("x")))


class Script(Served):
    """A client with answers that are told before."""

    def __init__(self, *answers: RowAnswer | Exception) -> None:
        self._answers = list(answers)

    async def send(self, request: RowRequest) -> RowAnswer:
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


def taken_row(row: Row = ROW) -> TakenRow:
    return TakenRow(OpenBatch(BATCH), row)


async def sent(sender: Sender, taken: TakenRow) -> Result | None:
    """Send a row until it has its result."""
    while isinstance(found := await sender.try_once(taken), Again):
        pass
    return found


async def test_retry_after_is_kept() -> None:
    noted.clear()
    full = RequestError(429, "rate_limit_error", "full", retry_after_s=7.0)
    client = Script(RowAnswer(429, {}, 5.0), full, ConnectionError("reset"), RowAnswer(200, {"ok": True}))
    result = await sent(Sender(client, Fixed(1), Waits(), 0), taken_row())
    assert result is not None
    assert not result.is_error
    assert noted == [(1, 5.0), (2, 7.0), (3, None)]


async def test_a_final_error_is_not_tried_again() -> None:
    poison = RequestError(503, "service_unavailable", "it ended three engines", final=True)
    for answer in (poison, RowAnswer(503, {}, final=True)):
        result = await Sender(Script(answer), Fixed(1), Backoff(), 8).try_once(taken_row())
        assert isinstance(result, Result)
        assert result.is_error


async def test_a_refusal_by_an_engine_lowers_the_limit_unlike_a_quota_s() -> None:
    noted.clear()
    refused = QuotaError(429, "rate_limit_error", "none left", retry_after_s=36_000.0)
    limit = Auto(first=8)
    sender = Sender(Script(refused, RowAnswer(200, {})), limit, Waits(), 0)
    assert await sent(sender, taken_row()) is not None
    assert (limit.limit, noted) == (8, [(1, 36_000.0)])
    sender = Sender(Script(RowAnswer(429, {}), RowAnswer(200, {})), limit, Waits(), 0)
    assert await sent(sender, taken_row()) is not None
    assert limit.limit == 4


async def test_a_row_carries_the_engines_that_were_lost_with_it() -> None:
    class Losing(Script):
        """A client that loses an engine with each try."""

        async def send(self, request: RowRequest) -> RowAnswer:
            """Answer, and note the loss."""
            request.lost.append(f"engine {len(request.lost)}")
            return await super().send(request)

    full = RowAnswer(429, {})
    taken = taken_row()
    assert await sent(Sender(Losing(full, full, RowAnswer(200, {})), Fixed(1), Waits(), 0), taken)
    assert (taken.tries, taken.lost) == (3, ["engine 0", "engine 1", "engine 2"])


async def test_a_large_row_is_read_and_answered_beside_the_loop() -> None:
    class Watched(OpenBatch):
        """A batch that notes the threads of its rows."""

        def body(self, row: Row) -> bytes:
            """Note the thread."""
            threads.add(threading.get_ident())
            return super().body(row)

        def result(self, row: Row, answer: RowAnswer, tries: int) -> Result:
            """Note the thread."""
            threads.add(threading.get_ident())
            return super().result(row, answer, tries)

    threads: set[int] = set()
    large = Row(1, text_of(row("x", body={"model": "demo", "prompt": "x" * LARGE_BYTES})))
    sender = Sender(Script(RowAnswer(200, {})), Fixed(1), Backoff(), 0)
    assert isinstance(await sender.try_once(TakenRow(Watched(BATCH), large)), Result)
    assert threads
    assert threading.get_ident() not in threads


async def test_a_row_has_no_result_once_it_is_stopped() -> None:
    taken = taken_row()
    taken.run.stopping = True
    assert await Sender(Script(), Fixed(1), Backoff(), 0).try_once(taken) is None
