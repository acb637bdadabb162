"""A stream of an Engine, with what is needed to carry it on elsewhere beside it."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest

from serve_app.api.errors import engine_failed
from serve_app.api.scheduling import Scheduling
from serve_app.relay.asgi import Head, Message, RelayRequest, error_event, pack_error, run_app
from serve_app.relay.resume import LOST, Resume, Trail, to_ids, unframe

LIMIT_S = 5.0
REQUEST = RelayRequest("POST", "/v1/completions", b"", [], b"{}")
EVENTS = [(b"content-type", b"text/event-stream")]


@dataclass
class Engine:
    """An engine, as far as its trail is concerned."""

    dead: bool = False

    def trail(self, resume: Resume) -> Trail:
        trail = Trail(lambda: self.dead)
        trail.resume = resume
        return trail


def app(trail: Trail, *steps: Any, headers: list[tuple[bytes, bytes]] = EVENTS) -> Any:
    """Return an application that sends bytes; lists of ids go into the trail, and events are waited for."""

    async def run(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for step in steps:
            match step:
                case bytes():
                    await send({"type": "http.response.body", "body": step, "more_body": True})
                    await asyncio.sleep(0)
                case list():
                    trail.add(step)
                case asyncio.Event():
                    await step.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return run


async def received(messages: Any) -> list[bytes]:
    async with asyncio.timeout(LIMIT_S):
        return [message async for message in messages]


async def test_each_piece_brings_the_tokens_that_came_before_it() -> None:
    trail = Engine().trail("tokens")
    first, *others = await received(run_app(app(trail, [1, 2], b"a", [3], b"b", b"c"), REQUEST, trail=trail))
    head, piece, whole = Head.unpack(first)
    assert (head.status, head.resume, whole) == (200, "tokens", False)
    pieces = [unframe(each) for each in (piece, *others)]
    assert b"".join(body for _, body in pieces) == b"abc"
    assert [token for ids, _ in pieces for token in to_ids(ids)] == [1, 2, 3]
    assert to_ids(pieces[0][0])[:2] == [1, 2]


async def test_the_rest_of_a_stream_looks_the_same_when_it_comes_at_once() -> None:
    trail = Engine().trail("tokens")

    async def at_once(scope: Message, receive: Any, send: Any) -> None:
        trail.add([1])
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": b"a", "more_body": False})

    for resumes in (False, True):
        asked = replace(REQUEST, resumes=resumes)
        (message,) = await received(run_app(at_once, asked, trail=trail))
        head, piece, whole = Head.unpack(message)
        assert whole
        assert head.resume == ("tokens" if resumes else "")
        assert (unframe(piece)[1] if resumes else piece) == b"a"


@pytest.mark.parametrize("trail", [None, Engine().trail("")], ids=["no trail", "not resumable"])
async def test_other_streams_come_as_they_are(trail: Trail | None) -> None:
    first, *others = await received(run_app(app(Engine().trail(""), b"a", b"b"), REQUEST, trail=trail))
    head, piece, _ = Head.unpack(first)
    assert head.resume == ""
    assert piece + b"".join(others) == b"ab"


async def test_an_answer_that_is_no_stream_comes_as_it_is() -> None:
    trail = Engine().trail("tokens")
    headers = [(b"content-type", b"application/json")]
    first, *others = await received(run_app(app(trail, b"a", b"b", headers=headers), REQUEST, trail=trail))
    head, piece, _ = Head.unpack(first)
    assert head.resume == ""
    assert piece + b"".join(others) == b"ab"


@pytest.mark.parametrize("resume", ["tokens", "again", ""])
async def test_what_the_application_says_of_an_engine_that_died_is_dropped(resume: Resume) -> None:
    engine, died = Engine(), asyncio.Event()
    trail = engine.trail(resume)
    messages = run_app(
        app(trail, [1], b"a", died, b'data: {"error": 1}\n\n', b"data: [DONE]\n\n"), REQUEST, trail=trail
    )
    await asyncio.wait_for(anext(messages), LIMIT_S)
    engine.dead = True
    died.set()
    (last,) = await received(messages)
    assert last == (LOST if resume else error_event(engine_failed()))


async def test_an_engine_that_died_before_the_head_has_not_answered() -> None:
    trail = Engine(dead=True).trail("tokens")
    failed = engine_failed()
    messages = run_app(app(trail, b"data: {}\n\n"), REQUEST, refusal=lambda: failed, trail=trail)
    assert await received(messages) == [pack_error(failed)]


# How long a request may still wait


def request(timeout_s: float | None, ago_s: float, *, resumes: bool = False) -> RelayRequest:
    scheduling = Scheduling(queue_timeout_s=timeout_s)
    return RelayRequest("POST", "/x", b"", [], b"", scheduling, time.time() - ago_s, resumes)


def test_what_it_waited_elsewhere_counts() -> None:
    left = request(30.0, 10.0).scheduling_now().queue_timeout_s
    assert left is not None
    assert 10 < left <= 20


def test_a_deadline_may_have_passed_on_the_way() -> None:
    left = request(5.0, 10.0).scheduling_now().queue_timeout_s
    assert left is not None
    assert left < 0


def test_a_clock_that_is_ahead_gives_no_more_time_than_was_asked_for() -> None:
    assert request(30.0, -100.0).scheduling_now().queue_timeout_s == 30.0


def test_a_request_may_wait_for_ever() -> None:
    assert request(None, 10.0).scheduling_now() == Scheduling()


def test_a_stream_that_goes_on_has_started_in_time() -> None:
    assert request(5.0, 10.0, resumes=True).scheduling_now().queue_timeout_s is None
