"""Rows in lists: each row gets the answer that it would have alone."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.jobs.lists import Lists
from serve_app.jobs.pacing import EngineLoad
from serve_app.jobs.rows import RowAnswer
from tests.progress import STILL_S
from tests.serve_app.jobs.engine import Served

SCHEDULING = Scheduling()


class Service(Served):
    """Answers each prompt with its text in capitals.

    Args:
        failure: Returns the failure of a call with these prompts, if it fails.

    Attributes:
        calls: The prompts of each call.
        running: Calls under way.
        most: Most calls that were ever under way.
    """

    def __init__(self, failure: Callable[[list[str]], RowAnswer | Exception | None] = lambda _: None) -> None:
        self.calls: list[list[str]] = []
        self.running = self.most = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self.go.set()
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self._failure = failure

    async def send(
        self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None = None
    ) -> RowAnswer:
        prompts = body["prompts"]
        self.calls.append(prompts)
        self.begun.set()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.ended.set()
        if isinstance(failure := self._failure(prompts), Exception):
            raise failure
        errors = [{"index": at, "type": "bad"} for at, text in enumerate(prompts) if text.startswith("bad")]
        body = {
            "results": [None if text.startswith("bad") else text.upper() for text in prompts],
            "details": [None if text.startswith("bad") else {"n": len(text)} for text in prompts],
        }
        return failure or RowAnswer(200, body | ({"errors": errors} if errors else {}))

    async def load(self, base: str | None) -> EngineLoad | None:
        return EngineLoad(1, 2)


async def ask(lists: Lists, *texts: str, **fields: Any) -> list[RowAnswer]:
    async with asyncio.timeout(STILL_S):
        return await asyncio.gather(
            *(
                lists.send("/generate", {"prompts": [text], "task_id": text} | fields, SCHEDULING, None)
                for text in texts
            )
        )


async def test_rows_share_calls_and_have_answers_of_their_own() -> None:
    service = Service()
    answers = await ask(Lists(service, 2), "a", "bad", "ccc")
    assert service.calls == [["a", "bad"], ["ccc"]]
    assert [answer.body["results"] for answer in answers] == [["A"], [None], ["CCC"]]
    assert answers[1].body["errors"] == [{"index": 0, "type": "bad"}]
    assert answers[2].body["details"] == [{"n": 3}]


async def test_rows_with_other_fields_share_no_call() -> None:
    service, lists = Service(), None
    lists = Lists(service, 9)
    await asyncio.gather(
        ask(lists, "a", temperature=0), ask(lists, "b", temperature=1), ask(lists, "c", temperature=0)
    )
    assert sorted(service.calls) == [["a", "c"], ["b"]]


async def test_rows_of_a_failed_list_go_alone_until_they_are_answered() -> None:
    down = [True]
    service = Service(lambda _: RowAnswer(503, {}) if down[0] else None)
    lists = Lists(service, 3)
    assert [answer.status for answer in await ask(lists, "a", "b", "c")] == [503] * 3
    assert [answer.status for answer in await ask(lists, "a", "b", "c")] == [503] * 3
    down[0] = False
    assert [answer.status for answer in await ask(lists, "a", "b", "c")] == [200] * 3
    assert [len(call) for call in service.calls] == [3] + [1] * 6
    await ask(lists, "a", "b", "c")
    assert len(service.calls[-1]) == 3


async def test_the_rows_of_a_list_without_room_stay_together() -> None:
    full = [True]
    service = Service(
        lambda _: RequestError(429, "rate_limit_error", "full", retry_after_s=3.0) if full[0] else None
    )
    lists = Lists(service, 2)
    assert [(one.status, one.retry_after_s) for one in await ask(lists, "a", "b")] == [(429, 3.0)] * 2
    await ask(lists, "a", "b")
    assert service.calls == [["a", "b"]] * 2


async def test_what_engines_die_of_is_found_by_one_row_after_the_other() -> None:
    def deadly(prompts: list[str]) -> RowAnswer | None:
        return RowAnswer(500, {"error": {"message": "poison"}}, final=True) if "x" in prompts else None

    service = Service(deadly)
    answers = await ask(Lists(service, 4), "a", "x", "b", "c")
    assert [answer.status for answer in answers] == [200, 500, 200, 200]
    assert answers[1].final
    assert service.most == 1


async def test_a_list_that_is_too_large_goes_row_by_row_at_once() -> None:
    service = Service(lambda prompts: RowAnswer(413, {}) if len(prompts) > 1 else None)
    assert [answer.status for answer in await ask(Lists(service, 3), "a", "b", "c")] == [200] * 3


@pytest.mark.parametrize("body", [{}, {"results": ["A"], "details": [{}]}, {"results": 3, "details": []}])
async def test_an_answer_of_another_length_is_a_failure_of_the_service(body: JSON) -> None:
    answers = await ask(Lists(Service(lambda prompts: RowAnswer(200, body)), 2), "a", "b")
    assert [answer.status for answer in answers] == [502] * 2


async def test_an_error_of_the_connection_reaches_each_row() -> None:
    lists = Lists(Service(lambda _: ConnectionError("gone")), 2)
    for call in (ask(lists, "a"), ask(lists, "b")):
        with pytest.raises(ConnectionError):
            await call


async def test_a_call_is_given_up_with_the_last_of_its_rows() -> None:
    service = Service()
    service.go.clear()
    lists = Lists(service, 2)
    first, second = (asyncio.ensure_future(ask(lists, text)) for text in "ab")
    async with asyncio.timeout(STILL_S):
        await service.begun.wait()
        first.cancel()
        await asyncio.wait([first])
        assert service.running == 1
        second.cancel()
        await asyncio.wait([second])
        await service.ended.wait()
    assert service.cancelled == 1
