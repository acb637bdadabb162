"""The router of Ray Serve's handles, on Ray Serve's own base class, with replicas that the test plays."""

import asyncio
import pickle
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter

from serve_app.api.facts import Facts, prefix_hashes
from serve_app.app import ROUTER
from serve_app.ingress.replica_choice import ReplicaCharge
from serve_app.ingress.replica_router import EngineRouter
from serve_app.wire.request import RelayRequest
from tests.progress import STILL_S

LIMIT_S = STILL_S
DEPLOYMENT = DeploymentID("Engine:demo", "llm")
PREFIX = tuple(range(1, 8))


@dataclass
class Replica:
    """A replica; the router asks it for its queue where it doesn't know it.

    Attributes:
        died: It raises as a dead actor does.
        asked: Set once it was asked for its queue.
        answers: It answers after this is set.
    """

    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)
    replica_metadata: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 100
    died: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.replica_id = ReplicaID(self.name, DEPLOYMENT)
        self.answers.set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked.set()
        await self.answers.wait()
        if self.died:
            raise ActorDiedError()
        return 0


class Handle:
    """The part of Ray Serve around a router, as far as the tests need it."""

    def __init__(self, *replicas: Replica, **options: Any) -> None:
        made: Any = EngineRouter
        self.router: EngineRouter = made(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            # Ray Serve passes these to routers that know localities.
            self_node_id="node",
            prefer_local_node_routing=False,
        )
        self.router.initialize_state(**options)
        self.update(*replicas)

    def update(self, *replicas: Replica) -> None:
        """Give it replicas, of which it knows the queues of those that answer."""
        self.router.update_replicas(list(replicas))  # type: ignore[arg-type]
        for replica in replicas:
            if replica.answers.is_set():
                self.router.on_new_queue_len_info(replica.replica_id, 0)

    def pending(self, argument: Any) -> PendingRequest:
        # Calls of one request to the Ingress share their ids.
        metadata = RequestMetadata(request_id="r", internal_request_id="shared")
        return PendingRequest(args=[argument], kwargs={}, metadata=metadata)

    async def send(self, argument: Any, *, is_retry: bool = False) -> str:
        """Route a request, and have the replica take it."""
        pending = self.pending(argument)
        async with asyncio.timeout(LIMIT_S):
            replica = await self.router._choose_replica_for_request(pending, is_retry=is_retry)
        self.router.on_send_request(replica.replica_id)
        self.router.on_request_routed(pending, replica.replica_id, None)
        return replica.replica_id.unique_id

    @property
    def tokens(self) -> dict[str, int]:
        return {name: load.tokens for name, load in self.router.choice.loads.items()}


def relayed(
    prefix: tuple[int, ...] = (), tokens: int = 1_000, charge: ReplicaCharge | None = None
) -> RelayRequest:
    facts = Facts(prefix=prefix, tokens=tokens)
    charge = charge or ReplicaCharge()
    return RelayRequest("POST", "/v1/completions", b"", [], b"{}", facts=facts, charge=charge)


@pytest.fixture
async def three() -> Handle:
    return Handle(*map(Replica, "abc"))


async def test_requests_with_one_prefix_go_to_one_replica(three: Handle) -> None:
    chosen = [await three.send(relayed(PREFIX)) for _ in range(4)]
    assert len(set(chosen)) == 1
    assert sorted(three.tokens.values()) == [0, 0, 4_000]


async def test_without_prefixes_they_go_by_load_alone() -> None:
    handle = Handle(*map(Replica, "abc"), prefixes=False)
    for _ in range(30):
        await handle.send(relayed(PREFIX))
    assert max(handle.tokens.values()) <= 12_000


async def test_a_request_gives_its_tokens_back_when_it_ends(three: Handle) -> None:
    charge = ReplicaCharge()
    name = await three.send(relayed(PREFIX, charge=charge))
    assert three.tokens[name] == 1_000
    charge.release()
    assert set(three.tokens.values()) == {0}


async def test_requests_that_come_at_once_see_each_other() -> None:
    handle = Handle(Replica("a"), Replica("b"))
    chosen = await asyncio.gather(*(handle.send(relayed(tokens=16_384)) for _ in range(10)))
    assert chosen.count("a") == chosen.count("b") == 5


async def test_calls_without_a_charge_are_spread_by_their_number(three: Handle) -> None:
    """The replica refuses nonsense. A column of a dataset is an array, which has no truth value."""
    calls = [{"prompts": ["x"]}, {"prompts": np.array(["a", "b"])}, {}, {"prompts": 3}, None, "text"]
    chosen = [await three.send(call) for call in calls * 50]
    # The better of two keeps them within a few calls; chance alone spreads 300 calls by 20.
    assert max(chosen.count(name) for name in "abc") <= 104
    assert set(three.tokens.values()) == {0}


async def test_a_call_without_a_charge_wakes_no_replica_beside_one_that_is_awake() -> None:
    handle = Handle(Replica("a", {"asleep": 1}), Replica("b"))
    assert {await handle.send({"prompts": ["x"]}) for _ in range(4)} == {"b"}


async def test_a_request_without_arguments_is_routed(three: Handle) -> None:
    pending = PendingRequest(
        args=[], kwargs={}, metadata=RequestMetadata(request_id="r", internal_request_id="i")
    )
    async with asyncio.timeout(LIMIT_S):
        await three.router._choose_replica_for_request(pending)


async def test_a_request_that_comes_back_goes_to_another_replica(three: Handle) -> None:
    """The Ingress sends again what a replica failed; it may be the one that has the prefix."""
    for _ in range(4):
        holder = await three.send(relayed(PREFIX))
    request = relayed(PREFIX)
    met = [await three.send(request) for _ in range(3)]
    assert met[0] == holder
    assert sorted(met) == ["a", "b", "c"]


async def test_a_request_that_has_met_all_replicas_goes_to_another_than_the_last() -> None:
    handle = Handle(Replica("a"), Replica("b"))
    request = relayed(PREFIX)
    met = [await handle.send(request) for _ in range(12)]
    assert all(one != next for one, next in pairwise(met))
    # The only one there is is taken again.
    handle.update(Replica("a"))
    assert [await handle.send(request) for _ in range(3)] == ["a"] * 3


async def test_requests_that_change_places_are_counted_where_they_went() -> None:
    """Ray Serve assigns requests in order: one whose replica doesn't answer gets that of the next."""
    slow, quick = Replica("slow"), Replica("quick")
    slow.answers.clear()
    handle = Handle(slow, quick)
    handle.router.choice.send(ReplicaCharge(), "slow", PREFIX, 0)
    charges = ReplicaCharge(), ReplicaCharge()
    first = asyncio.ensure_future(handle.send(relayed(PREFIX, charge=charges[0])))
    async with asyncio.timeout(LIMIT_S):
        await slow.asked.wait()
        second = asyncio.ensure_future(handle.send(relayed(tokens=7, charge=charges[1])))
        assert await first == "quick"
        slow.answers.set()
        went = await second
    tokens = {"slow": 0, "quick": 1_000}
    tokens[went] += 7
    assert handle.tokens == tokens
    for charge in charges:
        charge.release()
    assert handle.tokens == {"slow": 0, "quick": 0}


async def test_a_request_that_was_assigned_is_not_charged_again(three: Handle) -> None:
    pending = three.pending(relayed())
    async with asyncio.timeout(LIMIT_S):
        await three.router._choose_replica_for_request(pending)
        await three.router.choose_replicas(list(three.router.curr_replicas.values()), pending)
        await asyncio.sleep(0)
    assert sum(three.tokens.values()) == 1_000


async def test_a_request_whose_caller_leaves_before_it_is_assigned_is_not_charged() -> None:
    replica = Replica("a")
    replica.answers.clear()
    handle = Handle(replica)
    charge = ReplicaCharge()
    task = asyncio.ensure_future(handle.send(relayed(charge=charge)))
    # It is asked for its queue once the replica is chosen.
    async with asyncio.timeout(LIMIT_S):
        await replica.asked.wait()
    replica.asked.clear()
    assert handle.tokens == {"a": 1_000}
    task.cancel()
    await asyncio.wait({task}, timeout=LIMIT_S)
    charge.release()
    assert handle.tokens == {"a": 0}


async def test_a_replica_that_turns_out_dead_is_left_out_and_the_others_keep_their_prefixes() -> None:
    replicas = {name: Replica(name) for name in "abc"}
    handle = Handle(*replicas.values())
    prefixes = [prefix_hashes(f"{number} ".encode() * 1_000) for number in range(100, 130)]
    holders = [await handle.send(relayed(prefix)) for prefix in prefixes]
    assert set(holders) == {"a", "b", "c"}
    dead = holders[0]
    replicas[dead].died = True
    handle.router.on_replica_actor_unavailable(replicas[dead].replica_id)
    again = [await handle.send(relayed(prefix)) for prefix in prefixes]
    assert dead not in again
    kept = [name for name, before in zip(again, holders, strict=True) if before != dead]
    assert kept == [name for name in holders if name != dead]
    assert set(handle.tokens) == set("abc") - {dead}


async def test_a_replica_that_starts_again_holds_nothing(three: Handle) -> None:
    charge = ReplicaCharge()
    holder = await three.send(relayed(PREFIX, charge=charge))
    others = [Replica(name) for name in "abc" if name != holder]
    three.update(*others)
    charge.release()
    three.update(*others, Replica(holder))
    assert set(three.tokens.values()) == {0}
    assert await three.send(relayed(PREFIX)) in "abc"
    # The one that was chosen now is the only one that holds it.
    assert len({await three.send(relayed(PREFIX)) for _ in range(4)}) == 1


async def test_a_request_waits_until_a_replica_is_there() -> None:
    handle = Handle()
    task = asyncio.ensure_future(handle.send(relayed(PREFIX)))
    await asyncio.sleep(0)
    assert not task.done()
    handle.update(Replica("a"))
    async with asyncio.timeout(LIMIT_S):
        assert await task == "a"


async def test_reports_and_capacities_of_replicas_reach_the_policy() -> None:
    handle = Handle(
        Replica("a", {"tokens": 70_000}, {"token_capacity": 128_000}), Replica("b", {"tokens": 30_000})
    )
    reported = {name: load.reported for name, load in handle.router.choice.loads.items()}
    assert reported == {"a": 70_000, "b": 30_000}
    # This caller has nothing on any of them yet: the reports decide.
    assert [await handle.send(relayed()) for _ in range(2)] == ["b", "a"]


def test_ray_serve_can_send_the_router_to_other_processes() -> None:
    options: dict[str, Any] = {"request_router_class": ROUTER}
    config = RequestRouterConfig(**options)
    sent = pickle.loads(pickle.dumps(config.get_serialized_request_router_cls()))
    assert issubclass(cloudpickle.loads(sent), RequestRouter)
    assert config.get_request_router_class().__name__ == "EngineRouter"
