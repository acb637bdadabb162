"""Ray Serve's choice of an Engine replica, made by `ReplicaChoice`.

Ray Serve pickles the class with all of its module and sends it to every process that has a handle of an
Engine: the module holds nothing else.
"""

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.ingress.replica_choice import ReplicaCharge, ReplicaChoice, ReplicaState
from serve_app.wire.request import RelayRequest


class EngineRouter(FIFOMixin, RequestRouter):
    """Chooses the replica of an Engine by the prefixes and the tokens that the replicas hold.

    A request with a charge brings the hashes of its prompt and its tokens. It goes to another replica each
    time, while there is one: if it comes back, a replica has failed it, or has not taken it. For other calls,
    as of a handle, Ray Serve takes the replica with fewer calls, of two.

    Attributes:
        choice: The policy.
    """

    def initialize_state(self, **options: Any) -> None:
        """Set the policy up.

        Args:
            options: Arguments of `ReplicaChoice`; Ray Serve passes the `request_router_kwargs`.
        """
        self.choice = ReplicaChoice(**options)
        self._by_name: dict[str, RunningReplica] = {}

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
        """Return the replicas for a request; Ray Serve asks again if no replica takes it."""
        if pending_request is None or pending_request.future.done() or not self._by_name:
            # Nothing is to be sent: Ray Serve asks once more for a request that has been assigned meanwhile.
            return [candidate_replicas]
        # Ray Serve waits before it asks for the third time.
        pending_request.routing_context.should_backoff = True
        charged = _charged(pending_request)
        if charged is None:
            return [[self._by_name[name] for name in self.choice.two()]]
        request, charge = charged
        facts = request.facts
        name = self.choice.choose(facts.prefix, charge.met, request.adapter)
        # Charged now: of the requests that come at once, each has to see those before it.
        self.choice.send(charge, name, facts.prefix, facts.tokens, request.adapter)
        return [[self._by_name[name]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Charge the replica that has taken a request; it may have been chosen for another request."""
        if (charged := _charged(pending_request)) is not None:
            self.choice.move(charged[1], replica_id.unique_id)


def _charged(pending_request: PendingRequest) -> tuple[RelayRequest, ReplicaCharge] | None:
    """Return a request with its charge; None: it has none."""
    request = pending_request.args[0] if pending_request.args else None
    if isinstance(request, RelayRequest) and isinstance(request.charge, ReplicaCharge):
        return request, request.charge
    return None
