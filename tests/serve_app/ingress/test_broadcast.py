"""Calls of every replica, with Ray Serve's own response and replicas that the test plays."""

import asyncio
from typing import Any

import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from serve_app.ingress.status import broadcast

TURNS = 20
"""More turns of the loop than a call needs once its replica has answered."""


class Answer:
    """The answer of a replica, for Ray Serve."""

    def __init__(self, given: "asyncio.Future[Any]") -> None:
        self._given = given

    async def get_async(self) -> Any:
        return await self._given


class Handle:
    """The handle of a model with one replica.

    Attributes:
        answers: The answer to each broadcast.
        calls: What was asked.
        options_given: The options that the caller set.
    """

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[Any]] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.options_given: list[dict[str, Any]] = []

    def options(self, **options: Any) -> "Handle":
        self.options_given.append(options)
        return self

    def broadcast(self, method: str, *arguments: Any) -> DeploymentBroadcastResponse:
        self.calls.append((method, arguments))
        given = asyncio.get_running_loop().create_future()
        self.answers.append(given)

        async def answers() -> list[Any]:
            return [Answer(given)]

        return DeploymentBroadcastResponse(answers(), None)


async def one() -> int:
    return 1


async def turn(count: int) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_each_replica_is_asked() -> None:
    handle = Handle()
    asking = asyncio.create_task(broadcast(handle, one, "prepare", "a", 1, timeout_s=60))
    await turn(TURNS)
    handle.answers[0].set_result("prepared")
    assert await asking == ["prepared"]
    assert handle.calls == [("prepare", ("a", 1))]
    assert handle.options_given == [{"_by_reference": True}]


async def test_a_model_without_replicas_is_not_asked() -> None:
    async def none() -> int:
        return 0

    handle = Handle()
    assert await broadcast(handle, none, "stats", timeout_s=60) == []
    assert handle.calls == []


@pytest.mark.parametrize("turns", range(TURNS))
async def test_a_cancellation_is_not_lost_to_an_answer(turns: int) -> None:
    handle = Handle()

    async def poll() -> None:
        while True:
            await broadcast(handle, one, "stats", timeout_s=60)

    polling = asyncio.create_task(poll())
    await turn(TURNS)
    handle.answers[0].set_result({})
    await turn(turns)
    polling.cancel()
    ended, going_on = await asyncio.wait([polling], timeout=1)
    for task in going_on:
        task.cancel()
    assert ended
    assert polling.cancelled()


async def test_a_replica_that_does_not_answer_in_time_is_an_error() -> None:
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 s"):
        await broadcast(Handle(), one, "stats", timeout_s=0.01)


async def test_a_controller_that_does_not_answer_in_time_is_an_error() -> None:
    async def never() -> int:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 s"):
        await broadcast(Handle(), never, "stats", timeout_s=0.01)


async def test_a_replica_that_stops_is_an_error_and_no_cancellation() -> None:
    handle = Handle()
    asking = asyncio.create_task(broadcast(handle, one, "stats", timeout_s=60))
    await turn(TURNS)
    handle.answers[0].cancel()
    with pytest.raises(ConnectionError, match="stopped while it was asked"):
        await asking
