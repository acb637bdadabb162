"""Answers of vLLM's application to jobs, as relay messages; the application and its engine are doubles."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from serve_app.api.errors import RequestError, type_of
from serve_app.engine.job import Job, current, set_current
from serve_app.wire.usage import Tokens
from tests.batcher.virtual import blocked, virtual
from tests.serve_app.engine.engine_doubles import REQUEST, PlayedReplica, failing, new_job
from tests.serve_app.ledger.crashing import FakeSequence

STREAM = [(b"content-type", b"text/event-stream")]


async def answer(replica: PlayedReplica, job: Job | None = None) -> tuple[int, Any]:
    (piece,) = [piece async for piece in replica.answer(job or new_job())]
    assert piece.head is not None
    return piece.head.status, json.loads(piece.body)


def kept(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return the kinds of the exceptions whose stacks are in the log."""
    return [record.exc_info[0] for record in caplog.records if record.exc_info]


@virtual
async def test_a_failure_is_not_made_the_request_s_fault() -> None:
    status, body = await answer(PlayedReplica(failing()))
    assert (status, body["error"]["message"]) == (500, "oh")


@pytest.mark.parametrize("status", [400, 404, 415, 500])
@virtual
async def test_an_error_on_a_route_of_anthropic_has_its_shape(status: int) -> None:
    job = new_job(replace(REQUEST, path="/v1/messages"))
    found, body = await answer(PlayedReplica(failing(status)), job)
    kind = {404: "not_found_error", 500: "api_error"}.get(status, "invalid_request_error")
    assert (found, body) == (status, {"type": "error", "error": {"type": kind, "message": "oh"}})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@virtual
async def test_what_a_prompt_was_refused_for_goes_before_what_the_application_makes_of_it(path: str) -> None:
    def refuse(job: Job) -> None:
        job.failure = RequestError(429, "rate_limit_error", "full", retry_after_s=3)

    job = new_job(replace(REQUEST, path=path))
    messages = [each async for each in PlayedReplica(failing(seen=refuse)).answer(job)]
    head = messages[-1].head
    assert head is not None
    assert (head.status, dict(head.headers)[b"retry-after"]) == (429, b"3")


def run_for(job: Job | None) -> None:
    """Let the engine run for a job."""
    assert job is not None
    own = job.usage.begin()
    own.count(FakeSequence(Tokens(10, 4, 3)))
    own.end()


class Field(BaseModel):
    """A field that an application of vLLM checks too late."""

    background: bool


def breaking(*, ran: bool) -> Any:
    """Return an application that fails behind the head of a stream, as vLLM's does on some values."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if ran:
            run_for(current())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            Field(background=None)  # type: ignore[arg-type]
        except ValidationError as error:
            raise RuntimeError("response already started") from error

    return app


@virtual
async def test_an_application_that_fails_behind_its_head_is_a_500_with_its_stack_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = new_job()
    status, body = await answer(PlayedReplica(breaking(ran=True)), job)
    assert (status, body["error"]["type"]) == (500, "internal_error")
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "fault of the service" in record.message
    # Its frames would hold what the request holds.
    assert job.fault is None


@virtual
async def test_a_value_that_breaks_the_head_before_a_run_is_a_400() -> None:
    status, body = await answer(PlayedReplica(breaking(ran=False)))
    assert (status, body["error"]["message"]) == (400, "background: Input should be a valid boolean")


@virtual
async def test_a_stream_whose_application_breaks_off_ends_with_an_error_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        await asyncio.sleep(1.0)
        raise KeyError("inside")

    first, last = [each async for each in PlayedReplica(app).answer(new_job())]
    assert first.body == b"data: a\n\n"
    assert last.usage is not None
    assert last.usage.outcome == "failed"
    assert json.loads(last.body.removeprefix(b"data: "))["error"]["type"] == "internal_error"
    assert b"inside" not in last.body
    assert kept(caplog) == [KeyError]


def telling(*events: bytes, ran: bool, head: Any = STREAM, status: int = 200) -> Any:
    """Return an application that tells of an error in its own words, before or after the engine ran."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if ran:
            run_for(current())
        await send({"type": "http.response.start", "status": status, "headers": head})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": event is not events[-1]})
            await asyncio.sleep(1.0)

    return app


HOT = b'data: {"error": {"message": "too hot (parameter=a, value=9)", "param": null, "code": 400}}\n\n'
OH = b'event: error\ndata: {"type": "error", "error": {"type": "internal_error", "message": "oh"}}\n\n'


@pytest.mark.parametrize(
    ("event", "ran", "status", "words"),
    [
        (HOT, False, 400, "too hot"),
        (HOT, True, 500, "The service failed on this request; its log has the reason."),
        (OH, False, 500, "oh"),
    ],
)
@virtual
async def test_an_error_that_the_application_tells_in_a_stream_is_its_answer(
    event: bytes, ran: bool, status: int, words: str
) -> None:
    assert await answer(PlayedReplica(telling(event, b"data: [DONE]\n\n", ran=ran))) == (
        status,
        {"error": {"message": words, "type": type_of(status), "param": None, "code": status}},
    )
    first, last = [
        each async for each in PlayedReplica(telling(b"data: a\n\n", event, b"b", ran=ran)).answer(new_job())
    ]
    assert first.body == b"data: a\n\n"
    assert last.usage is not None
    assert last.usage.outcome == "failed"
    assert json.loads(last.body.removeprefix(b"data: "))["error"]["message"] == words


@pytest.mark.parametrize(("ran", "status"), [(True, 500), (False, 400)])
@virtual
async def test_an_answer_that_can_not_be_made_of_tokens_is_a_fault(ran: bool, status: int) -> None:
    app = telling(b'{"error": {"message": "1 validation error"}}', ran=ran, head=[], status=400)
    assert (await answer(PlayedReplica(app)))[0] == status


@virtual
async def test_a_mistake_in_another_request_is_told_by_its_field() -> None:
    reason = (
        "1 validation error for ChatCompletionRequest\nmessages.0.name\n  Input should be a string [type=x, "
    )
    app = telling(json.dumps({"error": {"message": reason}}).encode(), ran=False, head=[], status=400)
    _, body = await answer(PlayedReplica(app))
    assert body["error"]["message"] == "name: Input should be a string"


@virtual
async def test_media_by_the_url_of_a_file_are_a_400() -> None:
    reason = "Cannot load local files without `--allowed-local-media-path`."
    event = json.dumps({"error": {"message": reason}}).encode()
    app = telling(event, ran=False, head=[], status=500)
    job = new_job(facts={"media": "image_url"})
    status, body = await answer(PlayedReplica(app), job)
    assert (status, body["error"]["param"]) == (400, "image_url")
    assert "data:" in body["error"]["message"]


@virtual
async def test_an_answer_that_breaks_off_in_its_middle_breaks_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"half": ', "more_body": True})
        await asyncio.sleep(1.0)
        raise KeyError("inside")

    messages = PlayedReplica(app).answer(new_job())
    assert (await anext(messages)).body == b'{"half": '
    with pytest.raises(KeyError):
        # The client can't take what it has for the whole.
        await anext(messages)
    assert kept(caplog) == [KeyError]


@virtual
async def test_the_first_token_of_a_stream_leaves_at_once() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        await asyncio.sleep(1.0)
        await send({"type": "http.response.body", "body": b"data: b\n\n"})

    messages = PlayedReplica(app).answer(new_job())
    first = asyncio.ensure_future(anext(messages))
    await blocked()
    piece = first.result()
    assert piece.head is not None
    assert (piece.head.status, piece.body) == (200, b"data: a\n\n")
    await messages.aclose()


@virtual
async def test_each_application_finds_its_own_job_in_tasks_of_its_own_too() -> None:
    both = asyncio.Barrier(2)
    found: list[tuple[str, Job | None]] = []

    async def find(name: str) -> None:
        found.append((name, current()))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await both.wait()
        await asyncio.create_task(find(scope["path"]))
        await failing(200)(scope, receive, send)

    jobs = {path: new_job(replace(REQUEST, path=path)) for path in ("/a", "/b")}
    openai = PlayedReplica(app)
    await asyncio.gather(*(asyncio.create_task(answer(openai, job)) for job in jobs.values()))
    assert sorted(found, key=lambda one: one[0]) == list(jobs.items())
    assert current() is None


@virtual
async def test_work_without_a_job_is_the_engine_s_own() -> None:
    assert current() is None
    job = new_job()

    async def own() -> Job | None:
        set_current(job)
        return current()

    assert await asyncio.create_task(own()) is job
    assert current() is None


@pytest.mark.parametrize(("path", "resumes"), [("/v1/completions", True), ("/v1/responses", False)])
@virtual
async def test_only_streams_of_some_routes_may_go_on_elsewhere(path: str, resumes: bool) -> None:
    job = new_job(replace(REQUEST, path=path))
    await answer(PlayedReplica(failing(200)), job)
    assert (job.stream is not None) == resumes
