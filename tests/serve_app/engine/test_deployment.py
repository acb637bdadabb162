"""Calls of an Engine at its face: admission, answers, rows in the ledger, reports; vLLM is a double."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.api.facts import Facts
from serve_app.api.protocol import GenerateRequest, GenerateResponse, Usage
from serve_app.api.scheduling import Scheduling
from serve_app.engine.accounts import BY_QUOTA
from serve_app.engine.deployment import Engine
from serve_app.engine.door import Door
from serve_app.engine.job import Job, current
from serve_app.ledger.rows import LedgerRow
from serve_app.settings.telemetry import SILENT
from serve_app.settings.usage import NO_USAGE, Quota, QuotasSettings, UsageSettings
from serve_app.telemetry.engine import EngineTelemetry
from serve_app.wire.frame import MAX_BODY_BYTES, Piece, unpack
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import Tokens
from tests.batcher.virtual import blocked, now, virtual
from tests.serve_app.answers import KEEP_ALIVE, LOST
from tests.serve_app.engine.engine_doubles import (
    BLOCK,
    FACTS,
    REQUEST,
    PlayedAdapters,
    PlayedEngine,
    Site,
    failing,
    grammar_body,
    new_job,
    opened,
)
from tests.serve_app.ledger.crashing import FakeSequence
from tests.serve_app.quotas.fleet import QuotasHandle, states_of

STREAM = [(b"content-type", b"text/event-stream")]
PROMPT = {"prompts": ["a"]}
ANSWER = GenerateResponse(
    results=["ab"], usage=Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3), task_id=None
)


class PlayedGenerate:
    """Stands for the work of `/generate`.

    Attributes:
        error: Raised behind the work; None: it is answered.
        seconds: Time that the work takes.
        ran: The jobs.
        meanwhile: Called while the work runs.
    """

    def __init__(self, door: Door) -> None:
        self.error: RequestError | None = None
        self.seconds = 0.0
        self.ran: list[Job] = []
        self.meanwhile: Any = lambda: None
        self._door = door

    async def run(
        self, job: Job, request: GenerateRequest, late: RequestError | None = None
    ) -> GenerateResponse:
        if late is not None:
            raise late
        await self._door.wait(job)
        assert job.slot is not None
        job.placed = True
        try:
            self.ran.append(job)
            own = job.usage.begin(job.slot)
            own.count(FakeSequence(Tokens(10, 4, 3)))
            await asyncio.sleep(self.seconds)
            own.end()
            self.meanwhile()
            if self.error is not None:
                raise self.error
            return ANSWER
        finally:
            job.slot.release()


class UnbuiltEngine(Engine):
    """An Engine whose constructor, which would start vLLM, has not run: there is nothing to end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Served:
    """An Engine behind a door.

    Attributes:
        engine: The Engine.
        parts: The same; a test may change any part.
        site: The door with all around it.
        generate: The work of `/generate`.
    """

    def __init__(self, app: Any, site: Site) -> None:
        self.engine: Engine = UnbuiltEngine.__new__(UnbuiltEngine)
        parts = self.parts = self.engine  # type: Any
        self.site = site
        self.generate = PlayedGenerate(site.door)
        parts._engine = PlayedEngine(site.door, self.generate, adapters=site.adapters)
        parts._engine.batcher = site.batcher
        site.door.unfit = parts._unfit
        parts._open("demo", SILENT, NO_USAGE, None)
        parts._accounts.book.keep_ended()
        parts._telemetry = EngineTelemetry(SILENT, "demo", site.batcher)
        parts._max_prompts = 10
        parts._app = app
        parts._routes = {REQUEST.path, "/v1/responses", "/detokenize", "/generate"}

    def limit(self, handle: QuotasHandle) -> None:
        """Let the quotas of a deployment hold."""
        self.parts._open("demo", SILENT, UsageSettings(quotas=handle.settings), handle)

    def die(self) -> None:
        """Let the engine die."""
        self.parts._engine.died = True

    async def pieces(self, request: RelayRequest = REQUEST) -> list[Piece]:
        """Return the messages of the answer to a request, without keep-alives."""
        return [unpack(each) async for each in self.engine.relay(request) if each != KEEP_ALIVE]

    async def answer(self, request: RelayRequest = REQUEST) -> tuple[int, Any]:
        """Return the status and the body of an answer in one message."""
        (piece,) = await self.pieces(request)
        assert piece.head is not None
        assert piece.usage is not None
        return piece.head.status, json.loads(piece.body)

    def rows(self) -> list[LedgerRow]:
        """Return the rows of the ledger."""
        return [call.row() for call in self.parts._accounts.book.take()]


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[Served]:
    """Serve an application; the options are those of `opened`."""
    # Jobs arrive by `time.monotonic`, and wait in virtual time.
    began = time.monotonic()
    async with opened(clock=lambda: began + now(), **options) as site:
        yield Served(app, site)


async def unreached(scope: Any, receive: Any, send: Any) -> None:
    """Stand for an application that no request reaches."""
    raise AssertionError


class Working:
    """An application whose engine samples three tokens, in the job's slot.

    Attributes:
        seconds: Time that the engine takes.
        stays: It stays until its client has left.
        status: Status of its answers.
        ended: Calls that have ended.
    """

    def __init__(self, *, seconds: float = 0.0, stays: bool = False, status: int = 200) -> None:
        self.status = status
        self.seconds = seconds
        self.stays = stays
        self.ended = 0
        self.site: Site

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        job = current()
        assert job is not None
        async with self.site.door.place(job, BLOCK, 0, 1) as slot:
            own = job.usage.begin(slot)
            own.count(FakeSequence(Tokens(10, 4, 3)))
            await asyncio.sleep(self.seconds)
            await send({"type": "http.response.start", "status": self.status, "headers": STREAM})
            await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": self.stays})
            if not self.stays:
                own.end()
            else:
                try:
                    await receive()
                    await receive()
                finally:
                    # The engine needs a moment to end it.
                    await asyncio.sleep(0.5)
                    own.end("cancelled")
                    self.ended += 1


@asynccontextmanager
async def working(app: Working, **options: Any) -> AsyncIterator[Served]:
    async with serving(app, **options) as served:
        app.site = served.site
        yield served


# Admission.


@virtual
async def test_a_full_queue_is_a_429_with_retry_after_before_any_byte_of_an_answer() -> None:
    async with serving(unreached, max_running=1, max_queue_size=1) as served:
        held = [asyncio.ensure_future(served.site.run(new_job())) for _ in range(2)]
        await blocked()
        for path in (REQUEST.path, "/generate"):
            (piece,) = await served.pieces(replace(REQUEST, path=path, body=b'{"prompts": ["a"]}'))
            assert piece.head is not None
            assert piece.head.status == 429
            assert b"retry-after" in dict(piece.head.headers)
        with pytest.raises(RequestError) as caught:
            await served.engine.generate(PROMPT)
        assert (caught.value.status, caught.value.retry_after_s is not None) == (429, True)
        assert served.generate.ran == []
        await asyncio.gather(*held)
        served.site.check_free()


@virtual
async def test_a_request_that_can_not_start_in_time_is_a_408() -> None:
    async with serving(unreached, max_running=1) as served:
        held = asyncio.ensure_future(served.site.run(new_job(), 10.0))
        await blocked()
        late = replace(REQUEST, scheduling=Scheduling(queue_timeout_s=2.0))
        by_handle = asyncio.ensure_future(served.engine.generate(PROMPT | {"queue_timeout_s": 2.0}))
        status, body = await served.answer(late)
        assert (status, body["error"]["type"]) == (408, "timeout_error")
        with pytest.raises(RequestError) as caught:
            await by_handle
        assert caught.value.status == 408
        assert now() == pytest.approx(2.0, abs=1.0)
        await held
        served.site.check_free()


@virtual
async def test_a_request_that_waits_at_the_door_has_keep_alives() -> None:
    async with serving(failing(200)) as served:
        # Of the same tenant, and its grammar is being compiled.
        held = asyncio.ensure_future(served.site.run(new_job(body=grammar_body(20))))
        await blocked()
        request = replace(REQUEST, body=grammar_body(1), facts=structs.replace(FACTS, grammar=b"x"))
        messages = [each async for each in served.engine.relay(request)]
        await held
        assert messages[:-1] == [KEEP_ALIVE] * len(messages[:-1])
        assert len(messages) >= 4
        piece = unpack(messages[-1])
        assert piece.head is not None
        assert piece.head.status == 200
        served.site.check_free()


@virtual
async def test_an_application_runs_in_the_slot_of_its_job() -> None:
    seen: list[int] = []
    async with serving(
        failing(200, seen=lambda job: seen.append(served.site.batcher.stats.running))
    ) as served:
        assert (await served.answer())[0] == 200
        assert seen == [1]
        served.site.check_free()


@virtual
async def test_an_adapter_that_is_not_served_is_a_404_with_those_that_are() -> None:
    async with serving(failing(200)) as served:
        status, body = await served.answer(replace(REQUEST, adapter="demo:none"))
        assert (status, "served here: demo, demo:words" in body["error"]["message"]) == (404, True)
        assert (await served.answer(replace(REQUEST, adapter="demo:words")))[0] == 200
        with pytest.raises(RequestError, match="served here"):
            await served.engine.generate(PROMPT | {"model": "demo:none"})
        await served.engine.generate(PROMPT | {"model": "demo:words"})
        await served.engine.generate(PROMPT | {"model": "demo"})
        assert [job.request.adapter for job in served.generate.ran] == ["demo:words", ""]
        served.site.check_free()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions"])
@virtual
async def test_a_route_that_vllm_has_not_for_this_model_is_a_400(path: str) -> None:
    async with serving(unreached) as served:
        served.parts._routes -= {"/v1/responses", "/detokenize"}
        status, body = await served.answer(replace(REQUEST, path=path))
        message = f"model: 'demo' serves /generate and /v1/completions, not {path}"
        assert (status, body["error"]["message"]) == (400, message)


@virtual
async def test_media_are_refused_unless_the_model_takes_them() -> None:
    async with serving(failing()) as each:
        request = replace(REQUEST, facts=structs.replace(FACTS, media="image_url"))
        status, answered = await each.answer(request)
        assert status == 400
        assert answered["error"]["message"].startswith("'image_url' parts are not taken by this model")
        each.parts._multimodal = True
        assert (await each.answer(request))[0] == 500


@virtual
async def test_a_model_that_generates_nothing_says_what_it_serves() -> None:
    async with serving(unreached) as served:
        served.parts._routes = {"/v1/embeddings", "/score", "/v1/score", "/classify", "/tokenize"}
        status, body = await served.answer(replace(REQUEST, path="/generate"))
        message = "model: 'demo' serves /v1/embeddings, /v1/classify and /v1/score, not /generate"
        assert (status, body["error"]["message"], body["error"]["param"]) == (400, message, "model")
        with pytest.raises(RequestError) as caught:
            await served.engine.generate(PROMPT)
        assert (caught.value.status, caught.value.message) == (400, message)
        assert served.site.batcher.stats.total_submitted == 0


@virtual
async def test_a_replica_that_sleeps_refuses() -> None:
    async with serving(unreached) as served:
        asleep = RequestError(503, "service_unavailable", "another model has the device", retry_after_s=1.0)
        served.parts._turns = SimpleNamespace(refusal=asleep, asleep=True)
        assert (await served.answer())[0] == 503
        with pytest.raises(RequestError, match="another model"):
            await served.engine.generate(PROMPT)
        assert served.engine.record_routing_stats() == {"tokens": 0, "asleep": 1}


@virtual
async def test_a_call_over_the_handle_beyond_the_quota_of_its_tenant_gets_no_slot() -> None:
    handle = QuotasHandle(QuotasSettings(tenants={"acme": Quota(tokens_per_day=200)}, folder="/nowhere"))
    async with serving(unreached) as served:
        served.limit(handle)
        await served.engine.generate(PROMPT | {"tenant": "acme"})
        with pytest.raises(RequestError, match="tenant acme: tokens_per_day 200"):
            await served.engine.generate({"prompts": ["x" * 100] * 10, "tenant": "acme"})
        assert len(served.generate.ran) == 1
        await served.parts._accounts.stop()


@virtual
async def test_a_call_without_a_length_reserves_the_length_that_the_engine_takes() -> None:
    handle = QuotasHandle(QuotasSettings(tenants={"acme": Quota(tokens_per_day=50)}, folder="/nowhere"))
    async with serving(unreached) as served:
        served.limit(handle)
        body = b'{"prompts": ["a"], "tenant": "acme"}'
        for output, status in ((None, 200), (100, 400)):
            facts = Facts(prompt=20, output=output)
            request = replace(ACME, path="/generate", body=body, facts=facts)
            assert (await served.answer(request))[0] == status
        await served.parts._accounts.stop()


ACME = replace(REQUEST, scheduling=Scheduling(tenant="acme"), facts=Facts(prompt=100, output=50))


@virtual
async def test_an_answer_has_the_state_of_its_quotas_and_charges_what_it_took() -> None:
    handle = QuotasHandle(QuotasSettings(tenants={"acme": Quota(tokens_per_day=200)}, folder="/nowhere"))
    app = Working()
    async with serving(app) as served:
        app.site = served.site
        served.limit(handle)
        first, *_ = await served.pieces(ACME)
        assert first.head is not None
        headers = dict(first.head.headers)
        assert (first.head.status, headers[b"x-ratelimit-limit-tokens"]) == (200, b"200")
        assert headers[b"x-ratelimit-remaining-tokens"] == b"72"
        # The engine has counted 13 of the 128 that were reserved, its context.
        await served.parts._accounts.stop()
        (state,) = (await states_of(handle.service))["tenant acme"]
        assert state.remaining == 187


class LongPrompt(Working):
    """The same, for a prompt that is longer than the bound of its request."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        job = current()
        assert job is not None
        try:
            await job.cover(120)
        except RequestError as error:
            # As `GatedLLM` tells it.
            job.failure = error
            raise
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize(("limit", "status", "remaining"), [(147, 429, 147), (148, 200, 135)])
@virtual
async def test_a_prompt_beyond_its_bound_is_reserved_before_it_runs(
    limit: int, status: int, remaining: int
) -> None:
    """The request has reserved the context, 128, for a bound of 100, and its prompt has 120 tokens."""
    tenants = {"acme": Quota(tokens_per_day=limit, requests_per_minute=1)}
    handle = QuotasHandle(QuotasSettings(tenants=tenants, folder="/nowhere"))
    app = LongPrompt()
    async with serving(app) as served:
        app.site = served.site
        served.limit(handle)
        first, *_ = await served.pieces(ACME)
        assert first.head is not None
        assert first.head.status == status
        await served.parts._accounts.stop()
        tokens = [state for state in (await states_of(handle.service))["tenant acme"] if state.limit == limit]
        assert [state.remaining for state in tokens] == [remaining]
        served.site.check_free()


@virtual
async def test_a_refusal_by_a_quota_comes_with_its_limit_and_is_told_apart() -> None:
    handle = QuotasHandle(QuotasSettings(folder="/nowhere"))
    limited = replace(ACME, key="ada", quota=Quota(requests_per_minute=1))
    app = Working()
    async with serving(app) as served:
        app.site = served.site
        served.limit(handle)
        await served.pieces(limited)
        (piece,) = await served.pieces(limited)
        assert piece.head is not None
        assert piece.head.status == 429
        assert b"key ada: requests_per_minute 1: " in piece.body
        headers = dict(piece.head.headers)
        assert (headers[b"x-ratelimit-remaining-requests"], BY_QUOTA in piece.head.headers) == (b"0", True)
        assert 0 < int(headers[b"retry-after"]) <= 60
        await served.parts._accounts.stop()


@pytest.mark.parametrize("why", ["full queue", "deadline", "adapter"])
@virtual
async def test_a_refused_request_counts_for_no_limit(why: str) -> None:
    """By HTTP, by a list and by the handle alike; a request that is answered counts."""
    tenants = {"acme": Quota(requests_per_minute=10)}
    handle = QuotasHandle(QuotasSettings(tenants=tenants, folder="/nowhere"))
    app = Working()
    async with serving(app, max_running=1, max_queue_size=1) as served:
        app.site = served.site
        served.limit(handle)
        request = replace(ACME, facts=FACTS, body=b'{"prompts": ["a"]}')
        match why:
            case "deadline":
                request = replace(request, scheduling=Scheduling(tenant="acme", queue_timeout_s=1.0))
            case "adapter":
                request = replace(request, adapter="demo:none")
        call = PROMPT | {"tenant": "acme", "queue_timeout_s": request.scheduling.queue_timeout_s}
        count = {"full queue": 2, "deadline": 1}.get(why, 0)
        held = [asyncio.ensure_future(served.site.run(new_job(), 10.0)) for _ in range(count)]
        await blocked()
        for path in (REQUEST.path, "/generate"):
            (piece,) = await served.pieces(replace(request, path=path))
            assert piece.head is not None
            assert piece.head.status in (400, 404, 408, 429)
        if held:
            with pytest.raises(RequestError):
                await served.engine.generate(call)
        await asyncio.gather(*held)
        await served.pieces(ACME)
        await served.parts._accounts.stop()
        (state,) = (await states_of(handle.service))["tenant acme"]
        assert state.remaining == 9
        served.site.check_free()


# The slot of a job, to its end.


@virtual
async def test_the_slot_of_a_job_is_given_back_whatever_its_application_does() -> None:
    async def raises(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("inside")

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return

    for app in (failing(400), raises, silent):
        async with serving(app) as served:
            status, _ = await served.answer()
            assert status == (400 if app not in (raises, silent) else 500)
            served.site.check_free()


@pytest.mark.parametrize("where", ["the queue", "the application"])
@virtual
async def test_a_client_that_leaves_before_its_prompt_is_made_gives_its_slot_back(where: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await receive()

    async with serving(app, max_running=1) as served:
        if where == "the queue":
            held = asyncio.ensure_future(served.site.run(new_job(), 20.0))
            await blocked()
        messages = served.engine.relay(REQUEST)
        assert await anext(messages) == KEEP_ALIVE
        await messages.aclose()
        await blocked()
        if where == "the queue":
            assert served.site.batcher.stats.queue_depth == 0
            await held
        served.site.check_free()
        assert served.rows() == []
        stats = served.site.batcher.stats
        assert (stats.total_cancelled, stats.total_completed) == (1, 1 if where == "the queue" else 0)


@virtual
async def test_a_slot_with_a_prompt_is_held_until_the_engine_has_ended_it() -> None:
    app = Working(stays=True)
    async with working(app) as served:
        messages = served.engine.relay(REQUEST)
        await anext(messages)
        await messages.aclose()
        await blocked()
        # The application is told, and ends what it began.
        assert (served.site.batcher.stats.running, app.ended) == (1, 0)
        assert served.rows() == []
        await asyncio.sleep(0.6)
        assert app.ended == 1
        assert [(row.outcome, row.output_tokens) for row in served.rows()] == [("cancelled", 3)]
        served.site.check_free()


@virtual
async def test_a_call_over_the_handle_that_is_cancelled_gives_its_slot_back() -> None:
    async with serving(unreached) as served:
        served.generate.seconds = 10.0
        call = asyncio.ensure_future(served.engine.generate(PROMPT))
        await blocked()
        assert served.site.batcher.stats.running == 1
        call.cancel()
        await asyncio.wait([call])
        for job in served.generate.ran:
            assert job.slot
        assert served.engine.record_routing_stats() == {"tokens": 0}
        served.site.check_free()


# Answers.


@virtual
async def test_a_call_of_generate_is_answered_by_http_and_by_handle() -> None:
    async with serving(unreached) as served:
        request = replace(REQUEST, path="/generate", body=b'{"prompts": ["a"]}')
        status, body = await served.answer(request)
        assert (status, body["results"]) == (200, ["ab"])
        assert (await served.engine.generate(PROMPT))["results"] == ["ab"]
        assert (await served.engine.generate(GenerateRequest(prompts=["a"])))["results"] == ["ab"]
        status, body = await served.answer(replace(request, body=b'{"prompts": 5}'))
        assert (status, "prompts" in body["error"]["message"]) == (400, True)
        with pytest.raises(RequestError):
            await served.engine.generate({"prompts": ["a"] * 11})
        served.site.check_free()


@virtual
async def test_an_answer_that_is_too_large_for_one_message_comes_in_parts() -> None:
    body = b"x" * (2 * MAX_BODY_BYTES + 1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async with serving(app) as served:
        pieces = await served.pieces()
        assert len(pieces) == 3
        assert b"".join(piece.body for piece in pieces) == body


@virtual
async def test_more_token_ids_than_can_be_parsed_are_refused_without_a_slot() -> None:
    async with serving(failing(200)) as served:
        served.parts._routes.add("/tokenize")
        for path, tokens, status in (
            ("/detokenize", 1_000, 200),
            ("/tokenize", 2_000, 200),
            ("/detokenize", 2_000, 400),
        ):
            body = json.dumps({"model": "demo", "tokens": [7] * tokens}).encode()
            facts = structs.replace(FACTS, runs=False, output=0, size=len(body))
            found, answered = await served.answer(replace(REQUEST, path=path, body=body, facts=facts))
            assert found == status
        assert answered["error"]["param"] == "tokens"
        assert "max_tokenize_tokens" in answered["error"]["message"]
        assert served.site.texts.stats.total_submitted == 2
        served.site.check_free()


# An engine that dies.


@virtual
async def test_a_dead_engine_refuses_with_a_503_that_can_be_tried_elsewhere() -> None:
    async with serving(unreached) as served:
        served.die()
        for path in (REQUEST.path, "/generate"):
            status, body = await served.answer(replace(REQUEST, path=path))
            assert (status, body["error"]["type"]) == (503, "service_unavailable")
        # It has not had the request: whoever sent it need not suspect it.
        with pytest.raises(RequestError, match="Try again"):
            await served.engine.generate(PROMPT)
        served.site.check_free()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/generate"])
@virtual
async def test_the_requests_of_an_engine_that_dies_are_lost(path: str) -> None:
    async with serving(failing(seen=lambda _: served.die())) as served:
        served.generate.error = RequestError(503, "service_unavailable", "The engine failed")
        served.generate.meanwhile = served.die
        request = replace(REQUEST, path=path, body=b'{"prompts": ["a"]}')
        assert [each async for each in served.engine.relay(request)] == [LOST]
        served.parts._engine.died = False
        with pytest.raises(EngineLostError):
            await served.engine.generate(PROMPT)
        served.site.check_free()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
@virtual
async def test_a_stream_of_an_engine_that_dies_is_lost_on_every_route(path: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        await asyncio.sleep(1.0)
        served.die()
        await send({"type": "http.response.body", "body": b"data: an error\n\n"})

    async with serving(app) as served:
        pieces = await served.pieces(replace(REQUEST, path=path))
        assert [(piece.body, piece.lost) for piece in pieces] == [(b"data: a\n\n", False), (b"", True)]
        served.site.check_free()


# Reports.


@virtual
async def test_the_tokens_of_a_call_are_reported_until_it_ends() -> None:
    reported: list[Any] = []

    def report(_: Any = None) -> None:
        reported.append(served.engine.record_routing_stats())

    async with serving(failing(200, seen=report)) as served:
        await served.answer(replace(REQUEST, facts=structs.replace(FACTS, tokens=1_000)))
        assert reported == [{"tokens": 1_024}]
        served.generate.meanwhile = report
        await served.engine.generate({"prompts": ["x" * 4_000], "max_tokens": 24})
        assert reported[1]["tokens"] > 512
        assert served.engine.record_routing_stats() == {"tokens": 0}


@virtual
async def test_the_tokens_of_a_report_are_rounded() -> None:
    """Each change goes to all handles."""
    reported: list[int] = []
    sizes = [0, 1, 7, 100, 1_000, 100_000, *range(60_000, 69_000, 500)]

    def report(_: Any) -> None:
        reported.append(served.engine.record_routing_stats()["tokens"])

    async with serving(failing(200, seen=report)) as served:
        for tokens in sizes:
            await served.answer(replace(REQUEST, facts=structs.replace(FACTS, tokens=tokens)))
    assert reported[:6] == [0, 1, 7, 96, 1_024, 98_304]
    # A load that hardly changes is reported once.
    assert len(set(reported[6:])) <= 2


@virtual
async def test_the_adapters_that_are_loaded_are_reported() -> None:
    async with serving(unreached) as served:
        async with served.site.adapters.slots.claim("demo:words"):
            assert served.engine.record_routing_stats() == {"tokens": 0, "adapters": ["demo:words"]}
        assert served.engine.record_replica_metadata() == {"token_capacity": 1024, "adapter_slots": 2}


# The ledger.


@virtual
async def test_a_call_that_the_engine_ran_has_a_row_with_its_origin() -> None:
    async with working(Working()) as served:
        request = replace(
            REQUEST,
            headers=[(b"x-request-id", b"r-1")],
            scheduling=Scheduling(1, "acme"),
            key="ada",
            source="batch",
            resumes=True,
            adapter="demo:words",
        )
        await served.pieces(request)
        (row,) = served.rows()
        assert (row.key, row.tenant, row.tier, row.source) == ("ada", "acme", "flex", "batch")
        assert (row.endpoint, row.request_id, row.resumed) == ("/v1/completions", "r-1", True)
        assert (row.model, row.adapter) == ("demo", "demo:words")
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 4, 3)
        assert row.outcome == "ok"


@virtual
async def test_a_call_whose_answer_could_not_be_made_is_failed() -> None:
    async with working(Working(status=500)) as served:
        (piece,) = await served.pieces()
        assert piece.head is not None
        assert (piece.head.status, json.loads(piece.body)["error"]["type"]) == (500, "internal_error")
        assert [(row.outcome, row.output_tokens) for row in served.rows()] == [("failed", 3)]


@virtual
async def test_a_call_of_an_engine_that_died_is_lost() -> None:
    app = Working(seconds=1.0)
    async with working(app) as served:
        asyncio.get_running_loop().call_later(0.5, served.die)
        await served.pieces()
        assert [row.outcome for row in served.rows()] == ["lost"]


@virtual
async def test_a_refused_call_has_no_row() -> None:
    async with serving(failing(400), max_running=1, max_queue_size=1) as served:
        held = [asyncio.ensure_future(served.site.run(new_job())) for _ in range(2)]
        await blocked()
        assert (await served.answer())[0] == 429
        await asyncio.gather(*held)
        # vLLM has refused this one.
        assert (await served.answer())[0] == 400
        assert served.rows() == []


@virtual
async def test_a_call_over_the_handle_has_a_row() -> None:
    async with serving(unreached) as served:
        served.generate.error = RequestError(400, "invalid_request_error", "no")
        with pytest.raises(RequestError):
            await served.engine.generate(PROMPT | {"tenant": "acme", "service_tier": "priority"})
        (row,) = served.rows()
        found = (row.source, row.endpoint, row.tenant, row.tier)
        assert found == ("handle", "generate", "acme", "priority")


@virtual
async def test_requests_for_other_adapters_wait_in_the_queue_and_hold_nothing() -> None:
    app = Working(seconds=5.0)
    async with working(app, adapters=PlayedAdapters(1), max_running=3) as served:
        words = asyncio.ensure_future(served.pieces(replace(REQUEST, adapter="demo:words")))
        await blocked()
        sums = [asyncio.ensure_future(served.pieces(replace(REQUEST, adapter="demo:sums"))) for _ in range(3)]
        await blocked()
        assert (served.site.batcher.stats.running, served.site.batcher.stats.queue_depth) == (1, 3)
        await asyncio.gather(*(served.pieces() for _ in range(2)))
        assert now() == pytest.approx(5.0, abs=0.01)
        await asyncio.gather(words, *sums)
        assert now() == pytest.approx(10.0, abs=0.01)
        served.site.check_free()
