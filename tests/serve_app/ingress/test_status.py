"""Statistics: calls of every replica, with replicas that the test plays, and what a caller may see."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from serve_app.api.protocol import JSON
from serve_app.auth.key_store import Caller
from serve_app.auth.keys import Key, hash_key
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import ModelState, own_part, replica_stats
from serve_app.settings.schema import parse
from serve_app.stats import ReplicaStats
from tests.serve_app.ingress.engine_doubles import Client, Engine, echo, health

__all__ = ["health"]

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


async def test_the_statistics_are_those_of_each_replica() -> None:
    handle: Any = Handle()
    asking = asyncio.create_task(replica_stats(handle, one))
    await turn(TURNS)
    handle.answers[0].set_result({"replica": "a"})
    assert await asking == [ReplicaStats(replica="a")]
    assert handle.calls == [("stats", ())]
    assert handle.options_given == [{"_by_reference": True}]


async def test_a_model_without_replicas_is_not_asked() -> None:
    async def none() -> int:
        return 0

    handle: Any = Handle()
    assert await replica_stats(handle, none) == []
    assert handle.calls == []


@pytest.mark.parametrize("turns", range(TURNS))
async def test_a_cancellation_is_not_lost_to_an_answer(turns: int) -> None:
    handle: Any = Handle()

    async def poll() -> None:
        while True:
            await replica_stats(handle, one, 60)

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
    handle: Any = Handle()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 s"):
        await replica_stats(handle, one, 0.01)


async def test_a_controller_that_does_not_answer_in_time_is_an_error() -> None:
    async def never() -> int:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    handle: Any = Handle()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 s"):
        await replica_stats(handle, never, 0.01)


async def test_a_replica_that_stops_is_an_error_and_no_cancellation() -> None:
    handle: Any = Handle()
    asking = asyncio.create_task(replica_stats(handle, one))
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


# States and sums


READY = ModelState(3, asleep=False, awaits="")


async def total(health: dict[str, ModelState], *replicas: JSON) -> JSON:
    """Return the entry of a model with these replicas, with its state and its sums."""
    health.setdefault("demo", READY)
    async with Client(Engine(echo, stats=list(replicas))) as client:
        found: JSON = (await client.get("/stats")).json()["models"]["demo"]
    return found


STATES = [
    (ModelState(0, asleep=True, awaits=""), ("asleep", "")),
    (ModelState(0, asleep=False, awaits="a GPU"), ("starting", "a GPU")),
    # The last replica has gone since Ray Serve was asked.
    (READY, ("starting", "")),
]


@pytest.mark.parametrize(("state", "shown"), STATES)
async def test_the_state_of_a_model_without_replicas(
    health: dict[str, ModelState], state: ModelState, shown: tuple[str, str]
) -> None:
    health["demo"] = state
    found = await total(health)
    assert (found["state"], found["detail"]) == shown


@pytest.mark.parametrize(
    ("turns", "state"),
    [
        ([None], "ready"),
        (["awake"], "ready"),
        (["draining"], "ready"),
        (["asleep", "awake"], "ready"),
        (["asleep"], "asleep"),
        (["asleep", "failed"], "asleep"),
        (["waking", "asleep"], "starting"),
        (["loading"], "starting"),
        (["failed"], "failed"),
    ],
)
async def test_the_state_of_a_model_that_takes_turns(
    health: dict[str, ModelState], turns: list[str | None], state: str
) -> None:
    entries = [{"turn": turn and {"state": turn, "cause": "no memory"}} for turn in turns]
    found = await total(health, *entries)
    assert (found["state"], found["detail"]) == (state, "no memory" if state == "failed" else "")
    assert found["ready_replicas"] == 3


def replica(out: float, *tenants: str, **stats: Any) -> JSON:
    """Return the entry of a replica with a language model."""
    batcher = {"capacity": 100, "max_running": 64, **stats}
    uses = {name: {"calls": 2, "prompt": 5, "output": 1, "tokens_per_s": 1.5} for name in tenants}
    return {
        "usage": {"tenants": uses, "engine": {"prompt": 9, "output": 9, "preempted": 3}},
        "rates": {"busy": out / 100, "output_tokens_per_s": out, "requests_per_s": 1.0},
        "scheduler": {"bound_s": out / 1000},
        "goals": {"ttft_p99_s": 0.5},
        "batcher": batcher,
    }


async def test_a_model_sums_its_replicas_and_takes_the_slowest_percentiles(
    health: dict[str, ModelState],
) -> None:
    entry = await total(
        health,
        replica(50, "a", running=2, running_cost=30, queue_classes={-1: (2, 9), 1: (4, 9)}, ttft_p99_s=0.2),
        replica(30, "a", "b", running=6, running_cost=70, queue_classes={1: (1, 9), 9: (0, 0)}),
        {"replica": "new"},
    )
    found = entry["total"]
    assert (found["running"], found["max_running"], found["ttft_p99_s"]) == (8, 128, 0.2)
    assert found["waiting_by_tier"] == {"priority": 2, "flex": 5}
    assert (found["kv_tokens"], found["kv_capacity"], found["kv_used"]) == (100, 200, 0.5)
    assert (found["output_tokens_per_s"], found["requests_per_s"], found["busy"]) == (80, 2.0, 0.4)
    assert (found["prompt_tokens_per_s"], found["tpot_s"]) == (None, 0.1)
    assert (found["preempted"], found["bound_s"], found["goals"]["ttft_p99_s"]) == (6, 0.03, 0.5)
    assert {name: (use["calls"], use["tokens_per_s"]) for name, use in found["tenants"].items()} == {
        "a": (4, 3.0),
        "b": (2, 1.5),
    }


async def test_a_replica_without_a_bound_leaves_the_model_without_one(health: dict[str, ModelState]) -> None:
    found = await total(health, replica(1), replica(1, max_running=None))
    assert found["total"]["max_running"] is None


async def test_a_function_has_no_tokens_and_batches_of_a_mean_size(health: dict[str, ModelState]) -> None:
    two = ({"total_batches": 10, "avg_batch_size": 2.0}, {"total_batches": 30, "avg_batch_size": 6.0})
    found = (await total(health, *({"batcher": one | {"running": 4}} for one in two)))["total"]
    assert (found["running"], found["batch_size"]) == (8, 5.0)
    assert (found["kv_tokens"], found["kv_used"], found["output_tokens_per_s"]) == (None, None, None)


async def test_the_use_of_tenants_is_summed_over_models(health: dict[str, ModelState]) -> None:
    health |= {"x": READY, "y": READY}
    engines = {"x": Engine(echo, stats=[replica(1, "a", "b")]), "y": Engine(echo, stats=[replica(1, "a")])}
    async with Client(engines) as client:
        found = (await client.get("/stats")).json()["tenants"]
    assert {name: use["calls"] for name, use in found.items()} == {"a": 4, "b": 2}


async def test_the_sums_have_what_a_caller_may_see_alone(
    health: dict[str, ModelState], monkeypatch: pytest.MonkeyPatch
) -> None:
    health["demo"] = READY
    monkeypatch.setenv(
        "KEYS", json.dumps([{"name": "ada", "sha256": hash_key(b"ada"), "tenant": "research"}])
    )
    settings = parse({"models": [{"id": "demo", "simulate": "h100-8b"}], "access": {"keys_env": "KEYS"}})
    engines: Any = {"demo": Engine(echo, stats=stats()["models"]["demo"]["replicas"])}
    transport = httpx.ASGITransport(Ingress(settings, engines).__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as client:
        found = (await client.get("/stats", headers={"authorization": "Bearer ada"})).json()
    assert set(found["tenants"]) == set(found["models"]["demo"]["total"]["tenants"]) == {"research"}
    assert found["models"]["demo"]["simulated"] == "h100-8b"
