"""Statistics of replicas that the test plays."""

import asyncio
from typing import Any

import pytest

from serve_app.api.protocol import JSON
from serve_app.ingress.models import start_replica
from serve_app.ingress.status import replica_stats
from tests.serve_app.ingress.engine_doubles import Engine, answer


def handle_of(engine: Engine) -> Any:
    return engine


async def two() -> int:
    return 2


async def none() -> int:
    return 0


async def test_each_replica_reports() -> None:
    engine = Engine(answer(), stats=[{"replica": "a"}, {"replica": "b"}])
    assert await replica_stats(handle_of(engine), two) == [{"replica": "a"}, {"replica": "b"}]
    assert engine.broadcasts == ["stats"]


async def test_a_model_without_replicas_is_not_asked() -> None:
    engine = Engine(answer())
    assert await replica_stats(handle_of(engine), none) == []
    assert engine.broadcasts == []


async def test_a_replica_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(TimeoutError):
        await replica_stats(handle_of(Engine(answer(), stats=TimeoutError())), two)


async def test_a_replica_that_stops_is_an_error_and_no_cancellation() -> None:
    async def stopped() -> int:
        raise asyncio.CancelledError

    with pytest.raises(ConnectionError, match="stopped while it was asked"):
        await replica_stats(handle_of(Engine(answer())), stopped)


async def test_a_caller_that_is_cancelled_stops() -> None:
    async def never() -> int:
        await asyncio.Event().wait()
        return 1

    task = asyncio.create_task(replica_stats(handle_of(Engine(answer())), never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_replica_is_started_by_a_call() -> None:
    calls: list[dict[str, Any]] = []

    class Handle:
        def options(self, **options: Any) -> "Handle":
            calls.append(options)
            return self

        async def remote(self) -> JSON:
            return {}

    await start_replica(Handle())
    # Unlike a broadcast, a call makes Ray Serve scale the model up.
    assert [call["method_name"] for call in calls] == ["stats"]
