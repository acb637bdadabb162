"""Ray Serve's choice of an Engine replica, made by `ReplicaChoice`.

Ray Serve pickles the class with all of its module and sends it to every process that has a handle of an
Engine: the module holds nothing else.
"""

import asyncio
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.api.facts import facts_of_call
from serve_app.ingress.replica_choice import Charge, ReplicaChoice, ReplicaState
from serve_app.wire.request import RelayRequest


class EngineRouter(FIFOMixin, RequestRouter):
    """Chooses the replica of an Engine by the prefixes and the tokens that the replicas hold.

    A relayed request brings the hashes of its prompt and its tokens. Other calls, as of a handle, are
    estimated, and go by load alone.

    A relayed request goes to another replica each time, while there is one: if it comes back, a replica has
    failed it, or has not taken it.

    Attributes:
        choice: The policy.
    """

    REMEMBERED = 4_096
    """Relayed requests of which the replicas are remembered."""

    def initialize_state(self, **options: Any) -> None:
        """Set the policy up.

        Args:
            options: Arguments of `ReplicaChoice`; Ray Serve passes the `request_router_kwargs`.
        """
        self.choice = ReplicaChoice(**options)
        self._by_name: dict[str, RunningReplica] = {}
        self._met: OrderedDict[str, set[str]] = OrderedDict()
        # Requests that Ray Serve has not assigned yet, by the id of their future.
        self._choosing: dict[int, Charge] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over the replicas that there are, and what each reports."""
        super().update_replicas(replicas)
        self._by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self.choice.update(
            {
                name: ReplicaState(
                    tokens=replica.routing_stats.get("tokens", 0),
                    capacity=replica.replica_metadata.get("token_capacity"),
                    asleep=bool(replica.routing_stats.get("asleep")),
                    adapters=tuple(replica.routing_stats.get("adapters", ())),
                    slots=replica.replica_metadata.get("adapter_slots"),
                )
                for name, replica in self._by_name.items()
            }
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died, before the controller does."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self.choice.remove(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request; Ray Serve asks again if that one can't be had."""
        if pending_request is None or pending_request.future.done() or not self._by_name:
            # Nothing is to be sent: Ray Serve asks once more for a request that has been assigned meanwhile.
            return [candidate_replicas]
        # Ray Serve waits before it asks for the third time.
        pending_request.routing_context.should_backoff = True
        call = pending_request.metadata.internal_request_id
        future = pending_request.future
        request = pending_request.args[0] if pending_request.args else None
        before = self._choosing.get(id(future))
        if isinstance(request, RelayRequest):
            facts, adapter = request.facts, request.adapter
            name = self.choice.choose(facts.prefix, self._met.get(call, ()), adapter)
            self._meet(call, name)
        else:
            facts, adapter = facts_of_call(request), ""
            name = self.choice.choose((), avoid=[before.replica] if before else ())
        # Charged now: of the requests that come at once, each has to see those before it.
        self._choosing[id(future)] = self.choice.charge(call, name, facts.prefix, facts.tokens, adapter)
        if before:
            self.choice.loads.release(before)
        else:
            future.add_done_callback(self._assigned)
        return [[self._by_name[name]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica has taken a request."""
        self.choice.loads.take(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Take a request that has ended off its replica."""
        self.choice.loads.end(internal_request_id, replica_id.unique_id)

    def _assigned(self, future: "asyncio.Future[RunningReplica]") -> None:
        """Settle the charge of a request that was assigned to a replica, or was cancelled before."""
        charge = self._choosing.pop(id(future))
        if future.cancelled():
            self.choice.loads.release(charge)
        else:
            # Requests are assigned in their order: one may get the replica that was chosen for another.
            self.choice.loads.move(charge, future.result().replica_id.unique_id)

    def _meet(self, call: str, replica: str) -> None:
        met = self._met.setdefault(call, set())
        if len(met) + 1 >= len(self._by_name):
            # It has met all: it may meet them again.
            met.clear()
        met.add(replica)
        self._met.move_to_end(call)
        if len(self._met) > self.REMEMBERED:
            self._met.popitem(last=False)
