"""Engines that are lost with a request: which errors tell of it, and when the request is refused."""

import hashlib
import threading
from dataclasses import replace

import grpc
import pytest
from ray.exceptions import ActorDiedError, RayActorError

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.ingress.relay import (
    BACKOFF_S,
    LARGE_BYTES,
    MAX_LOST,
    REMEMBERED_S,
    EngineGoneError,
    EngineUnreachedError,
    Losses,
    LostEngines,
    PoisonError,
    back_off,
    is_lost,
    ran_there,
)
from serve_app.relay.request import RelayRequest
from tests.batcher.virtual import Clock, now, virtual

REQUEST = RelayRequest("POST", "/v1/completions", b"", [(b"x-request-id", b"1")], b'{"prompt": "x"}')


async def lose(lost: LostEngines, request: RelayRequest, *engines: str) -> Losses:
    """Have a request lose engines."""
    losses = await lost.enter(request)
    for engine in engines:
        try:
            assert await losses.add(EngineLostError(), engine)
        except PoisonError:
            assert losses.count == MAX_LOST
    return losses


async def count(lost: LostEngines, request: RelayRequest) -> int:
    """Return the losses that are remembered of a request; a request that is refused has the most."""
    try:
        return (await lost.enter(request)).count
    except PoisonError:
        return MAX_LOST


async def test_a_request_that_two_engines_were_lost_with_is_refused_and_not_to_be_sent_again() -> None:
    lost = LostEngines(Clock())
    assert (await lose(lost, REQUEST, "a")).count == 1
    losses = await lost.enter(REQUEST)
    with pytest.raises(PoisonError, match="not tried again"):
        await losses.add(EngineLostError(), "b")
    with pytest.raises(PoisonError, match="2 engines failed one after the other") as caught:
        await lost.enter(replace(REQUEST, headers=[], arrived_at=0.0))
    assert caught.value.status == 500
    assert caught.value.headers() == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    "other", [replace(REQUEST, body=b"{}"), replace(REQUEST, path="/v1/chat/completions")]
)
async def test_other_requests_are_not(other: RelayRequest) -> None:
    lost = LostEngines(Clock())
    await lose(lost, REQUEST, "a", "b")
    assert await count(lost, other) == 0


async def test_a_request_that_an_engine_answers_is_forgotten() -> None:
    lost = LostEngines(Clock())
    losses = await lose(lost, REQUEST, "a", "b")
    await losses.forget()
    assert await count(lost, REQUEST) == 0
    assert len(lost) == 0


async def test_a_request_is_forgotten_in_time() -> None:
    clock = Clock()
    lost = LostEngines(clock)
    await lose(lost, REQUEST, "a", "b")
    clock.now += REMEMBERED_S - 1
    assert await count(lost, REQUEST) == MAX_LOST
    clock.now += 1
    assert await count(lost, REQUEST) == 0
    assert len(lost) == 0, "what is over is dropped"


async def test_an_engine_that_takes_a_request_again_while_it_ends_is_lost_once() -> None:
    losses = Losses()
    for engine in ("a", "a", "a"):
        assert await losses.add(EngineLostError(), engine)
    # Not lost, or before it had the request.
    assert not await losses.add(ValueError(), "b")
    assert not await losses.add(EngineUnreachedError(), "b")
    with pytest.raises(PoisonError):
        await losses.add(EngineLostError(), "b")


async def test_engines_that_are_not_known_are_lost_each_time() -> None:
    losses = Losses()
    assert await losses.add(EngineLostError())
    with pytest.raises(PoisonError):
        await losses.add(EngineLostError())


async def test_one_engine_that_many_of_the_same_requests_ran_on_counts_once() -> None:
    lost = LostEngines(Clock())
    running = [await lost.enter(REQUEST) for _ in range(30)]
    for losses in running:
        assert await losses.add(EngineLostError(), "a")
    assert await count(lost, REQUEST) == 1


async def test_what_is_remembered_is_bounded_and_the_oldest_goes() -> None:
    lost = LostEngines(Clock(), most=3)
    requests = [replace(REQUEST, body=b"%d" % number) for number in range(4)]
    for request in requests:
        await lose(lost, request, "a", "b")
    assert len(lost) == 3
    assert [await count(lost, request) for request in requests] == [0, 2, 2, 2]


async def test_no_body_is_read_while_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = LostEngines(Clock())
    await (await lose(lost, REQUEST, "a")).forget()

    def read(*_: object) -> None:
        raise AssertionError("a body is read")

    monkeypatch.setattr(hashlib, "sha256", read)
    await (await lost.enter(REQUEST)).forget()


async def test_a_large_body_is_read_once_and_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    real = hashlib.sha256

    class Hash:
        """The hash of a request, which notes where the body is read."""

        def __init__(self, head: bytes) -> None:
            self._real = real(head)
            self.digest = self._real.digest

        def update(self, body: bytes) -> None:
            threads.append(threading.current_thread())
            self._real.update(body)

    monkeypatch.setattr(hashlib, "sha256", Hash)
    lost = LostEngines(Clock())
    request = replace(REQUEST, body=b"x" * (LARGE_BYTES + 1))
    await lose(lost, request, "a")
    losses = await lose(lost, request, "b")
    await losses.forget()
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_uploads_are_never_the_same_request() -> None:
    # Their bodies come in pieces that nobody has compared.
    upload = replace(REQUEST, path="/v1/files", body=b"", upload="1")
    lost = LostEngines(Clock())
    await lose(lost, upload, "a", "b")
    assert await count(lost, replace(upload, upload="2")) == 0
    assert await count(lost, replace(upload, method="GET", upload="")) == 0
    assert await count(lost, upload) == MAX_LOST


class RpcError(grpc.RpcError):  # type: ignore[misc]
    """An error of a gRPC call with a status."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status


@pytest.mark.parametrize(
    ("error", "lost", "ran"),
    [
        (ActorDiedError(), True, True),
        (RayActorError(), True, True),
        (EngineLostError(), True, True),
        (EngineUnreachedError(), True, False),
        (EngineGoneError(), True, False),
        (RpcError(grpc.StatusCode.UNAVAILABLE), True, True),
        (RpcError(grpc.StatusCode.INTERNAL), True, True),
        (RpcError(grpc.StatusCode.CANCELLED), True, False),
        (RpcError(grpc.StatusCode.INVALID_ARGUMENT), False, False),
        (grpc.RpcError(), False, False),
        (RequestError(400, "invalid_request_error", "wrong"), False, False),
        (ValueError("wrong"), False, False),
    ],
    ids=lambda value: repr(value) if isinstance(value, bool) else type(value).__name__,
)
def test_an_error_tells_whether_the_replica_is_gone_and_had_the_request(
    error: Exception, lost: bool, ran: bool
) -> None:
    assert (is_lost(error), ran_there(error)) == (lost, ran)


@pytest.mark.parametrize("tried", [1, 2, 3])
@virtual
async def test_the_wait_doubles_with_each_try_and_is_spread(tried: int) -> None:
    waits = []
    for _ in range(50):
        before = now()
        await back_off(tried)
        waits.append(now() - before)
    mean = BACKOFF_S * 2 ** (tried - 1)
    assert mean / 2 <= min(waits) < max(waits) <= 1.5 * mean + 1e-9
