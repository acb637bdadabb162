"""Statistics: calls of every replica, with replicas that the test plays, and what a caller may see."""

import asyncio
from typing import Any

import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from serve_app.api.protocol import JSON
from serve_app.auth.key_store import Caller
from serve_app.auth.keys import Key
from serve_app.ingress.status import broadcast, own_part, replica_stats
from serve_app.stats import ReplicaStats

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


async def test_the_statistics_are_those_of_each_replica() -> None:
    handle: Any = Handle()
    asking = asyncio.create_task(replica_stats(handle, one))
    await turn(TURNS)
    handle.answers[0].set_result({"replica": "a"})
    assert await asking == [ReplicaStats(replica="a")]
    assert handle.calls == [("stats", ())]


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


# The part that a caller may see


def caller(name: str, **fields: Any) -> Caller:
    """Return the caller with a key of the tenant `research`."""
    key = Key.model_validate({"name": name, "sha256": "0" * 64, "tenant": "research"} | fields)
    return Caller(key)


def stats() -> JSON:
    limit = {"tokens_per_day": {"limit": 9, "remaining": 4, "reserved": 0, "ends_in_s": 60.0}}
    return {
        "models": {
            "demo": {
                "replicas": [
                    {
                        "replica": "a",
                        "usage": {"tenants": {"research": {"calls": 1}, "sales": {"calls": 2}}},
                        "adapters": [{"id": "sql", "root": "s3://a"}, {"id": "secret", "root": "s3://b"}],
                    }
                ]
            },
            "none": {"replicas": [], "error": "no answer"},
        },
        "quotas": {
            "holders": 2,
            "limits": {"key ada": limit, "key bob": limit, "tenant research": limit, "tenant sales": limit},
        },
    }


def test_a_key_sees_its_own_usage_and_limits() -> None:
    found = own_part(stats(), caller("ada"))
    (replica,) = found["models"]["demo"]["replicas"]
    assert set(replica["usage"]["tenants"]) == {"research"}
    assert set(found["quotas"]["limits"]) == {"key ada", "tenant research"}
    assert found["quotas"]["holders"] == 2


@pytest.mark.parametrize(
    ("models", "adapters"),
    [(None, ["sql", "secret"]), (["demo", "sql"], ["sql"]), (["demo"], [])],
)
def test_a_key_sees_the_adapters_that_it_may_use(models: list[str] | None, adapters: list[str]) -> None:
    found = own_part(stats(), caller("ada", models=models))
    (replica,) = found["models"]["demo"]["replicas"]
    assert [adapter["id"] for adapter in replica["adapters"]] == adapters


@pytest.mark.parametrize("who", [None, caller("root", admin=True)])
def test_an_administrator_sees_all_and_so_does_anybody_without_keys(who: Caller | None) -> None:
    assert own_part(stats(), who) == stats()


def test_a_service_without_quotas_has_none_to_show() -> None:
    assert own_part({"models": {}}, caller("ada")) == {"models": {}}
    away = {"models": {}, "quotas": {"error": "the replica is gone"}}
    assert own_part(away, caller("ada")) == away
