"""When an Engine that sends nothing is given up, and when it isn't."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from ray.exceptions import ActorDiedError

from serve_app.api.errors import EngineLostError
from serve_app.ingress.engine_call import Attempt
from serve_app.wire.frame import KEEPALIVE_S, Piece
from tests.batcher.virtual import now, virtual
from tests.serve_app.answers import KEEP_ALIVE, LOST, message

T = TypeVar("T")
SILENCE_S = 60.0
"""Seconds without a word after which an engine is lost."""

LIMIT_S = 10 * SILENCE_S
A, B = message(body=b"a"), message(body=b"b")


class Answer:
    """The result of a handle: messages from the test, and nothing else until it is cancelled."""

    def __init__(self, *, taken: bool = True) -> None:
        self.said: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self.cancelled = asyncio.Event()
        # So Ray Serve says that no replica has accepted the request.
        self._replica_result: Any = None
        if taken:
            self.take()

    def take(self) -> None:
        """Note that a replica has accepted the request, as Ray Serve does."""
        self._replica_result = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "ac70"))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            message = asyncio.ensure_future(self.said.get())
            ended = asyncio.ensure_future(self.cancelled.wait())
            await asyncio.wait([message, ended], return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not message.done():
                # So does gRPC to who waits.
                message.cancel()
                raise asyncio.CancelledError
            if isinstance(said := message.result(), BaseException):
                raise said
            if said is None:
                return
            yield said

    def cancel(self) -> None:
        self.cancelled.set()


class Replicas:
    """Tells that engines are there or not, and counts the questions."""

    def __init__(self, *there: bool) -> None:
        self._there = list(there)
        self.asked = 0

    async def __call__(self) -> bool:
        self.asked += 1
        return self._there.pop(0) if len(self._there) > 1 else self._there[0]


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await awaitable


async def test_keep_alives_are_no_part_of_the_answer() -> None:
    answer = Answer()
    for said in (KEEP_ALIVE, A, KEEP_ALIVE, KEEP_ALIVE, B, None):
        answer.said.put_nowait(said)
    assert await soon(gather(Attempt(answer, Replicas(True)))) == [Piece(body=b"a"), Piece(body=b"b")]


async def gather(messages: Attempt) -> list[Piece]:
    return [message async for message in messages]


@pytest.mark.parametrize("begun", [False, True])
@virtual
async def test_an_engine_that_sends_nothing_is_given_up(begun: bool) -> None:
    answer = Answer()
    asked = Attempt(answer, Replicas(True))
    if begun:
        answer.said.put_nowait(A)
        assert await soon(anext(asked)) == Piece(body=b"a")
    with pytest.raises(EngineLostError, match="has sent nothing for 60 s"):
        await soon(anext(asked))
    assert SILENCE_S <= now() <= SILENCE_S + 2 * KEEPALIVE_S
    assert answer.cancelled.is_set()


@virtual
async def test_a_request_that_a_silent_engine_has_not_taken_did_not_run_there() -> None:
    with pytest.raises(EngineLostError, match="has not taken it for 60 s"):
        await soon(anext(Attempt(Answer(taken=False), Replicas(True))))
    assert SILENCE_S <= now() <= SILENCE_S + KEEPALIVE_S


@virtual
async def test_the_silence_of_an_engine_begins_when_it_takes_the_request() -> None:
    # It waits for the successor of an engine that has died, and is taken at any time after that.
    for waited in range(1, 4 * round(SILENCE_S / KEEPALIVE_S)):
        answer, served = Answer(taken=False), Replicas(False)
        call = Attempt(answer, served)
        waits = asyncio.ensure_future(anext(call))
        await asyncio.sleep((waited - 0.5) * KEEPALIVE_S)
        served._there = [True]
        answer.take()
        # The first keep-alive of an engine at work comes in half of this time.
        await asyncio.sleep(SILENCE_S - KEEPALIVE_S)
        assert not waits.done()
        answer.said.put_nowait(KEEP_ALIVE)
        answer.said.put_nowait(A)
        assert await soon(waits) == Piece(body=b"a")
        call.cancel()


@virtual
async def test_a_request_that_is_taken_while_ray_serve_is_asked_is_not_given_up() -> None:
    answer = Answer(taken=False)
    asked, answers = asyncio.Event(), asyncio.Event()

    async def served() -> bool:
        asked.set()
        await answers.wait()
        return True

    call = Attempt(answer, served)
    waits = asyncio.ensure_future(anext(call))
    await asked.wait()
    answer.take()
    answers.set()
    await asyncio.sleep(KEEPALIVE_S / 2)
    assert not answer.cancelled.is_set()
    answer.said.put_nowait(A)
    assert await soon(waits) == Piece(body=b"a")
    call.cancel()


@virtual
async def test_an_engine_that_sends_keep_alives_is_waited_for() -> None:
    answer = Answer()
    call = Attempt(answer, Replicas(True))
    waits = asyncio.ensure_future(anext(call))
    for _ in range(12):
        answer.said.put_nowait(KEEP_ALIVE)
        await asyncio.sleep(SILENCE_S / 4)
    assert not waits.done()
    answer.said.put_nowait(A)
    assert await soon(waits) == Piece(body=b"a")
    call.cancel()


@virtual
async def test_a_request_that_no_engine_can_have_yet_is_waited_for() -> None:
    answer, replicas = Answer(taken=False), Replicas(False, False, False, True)
    with pytest.raises(EngineLostError, match="has not taken it"):
        await soon(anext(Attempt(answer, replicas)))
    assert replicas.asked == 4


@virtual
async def test_an_engine_is_waited_for_while_its_state_is_unknown() -> None:
    answer = Answer(taken=False)
    asked = 0

    async def unknown() -> bool:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise ConnectionError
        answer.said.put_nowait(A)
        await asyncio.sleep(SILENCE_S / 4)
        return True

    # It says something while that is asked.
    assert await soon(anext(Attempt(answer, unknown))) == Piece(body=b"a")
    assert asked == 3
    assert not answer.cancelled.is_set()


@virtual
async def test_a_slow_client_does_not_make_an_engine_silent() -> None:
    answer = Answer()
    asked = Attempt(answer, Replicas(True))
    answer.said.put_nowait(A)
    assert await soon(anext(asked)) == Piece(body=b"a")
    # The client takes its time.
    await asyncio.sleep(4 * SILENCE_S)
    assert not answer.cancelled.is_set()
    answer.said.put_nowait(B)
    assert await soon(anext(asked)) == Piece(body=b"b")


async def test_an_engine_that_died_in_the_middle_is_lost() -> None:
    answer = Answer()
    answer.said.put_nowait(LOST)
    with pytest.raises(EngineLostError):
        await soon(anext(Attempt(answer, Replicas(True))))


async def test_other_failures_are_raised_as_they_are() -> None:
    answer = Answer()
    answer.said.put_nowait(ActorDiedError())
    with pytest.raises(ActorDiedError):
        await soon(anext(Attempt(answer, Replicas(True))))


async def test_a_call_that_serve_ends_is_lost_and_not_the_client_s_doing() -> None:
    answer = Answer()
    answer.said.put_nowait(asyncio.CancelledError())
    with pytest.raises(EngineLostError, match="was taken away"):
        await soon(anext(Attempt(answer, Replicas(True))))


async def test_a_caller_that_is_cancelled_gets_its_cancellation() -> None:
    answer = Answer()
    asked = Attempt(answer, Replicas(True))
    waits = asyncio.ensure_future(anext(asked))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waits)
    asked.cancel()
    assert answer.cancelled.is_set()
