"""Engines that are lost with a request: which errors tell of it, and how many are a request's result."""

import grpc
import pytest
from ray.exceptions import ActorDiedError, RayActorError

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.ingress.relay import (
    BACKOFF_S,
    EngineGoneError,
    EngineUnreachedError,
    Losses,
    PoisonError,
    back_off,
    is_lost,
    ran_there,
)
from tests.batcher.virtual import now, virtual


def test_an_engine_that_takes_a_request_again_while_it_ends_is_lost_once() -> None:
    losses = Losses()
    for engine in ("a", "a", "a", "b"):
        assert losses.add(EngineLostError(), engine)
    # Not lost, or before it had the request.
    assert not losses.add(ValueError(), "c")
    assert not losses.add(EngineUnreachedError(), "c")
    with pytest.raises(PoisonError):
        losses.add(EngineLostError(), "c")


def test_engines_that_are_not_known_are_lost_each_time() -> None:
    losses = Losses()
    assert losses.add(EngineLostError())
    assert losses.add(EngineLostError())
    with pytest.raises(PoisonError):
        losses.add(EngineLostError())


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
