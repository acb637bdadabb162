"""Names of Ray that aren't public, with the use of each, and a guard; see `serve_app.system.seams`.

Public is what Ray's documentation names, its alpha points included, as the router of requests. No name is
imported before it is asked for: Ray Serve reads its environment when a process imports it.
"""

from typing import Any

from serve_app.system.seams import Seam, load, look_for

START = "a service starts in a folder that others can't read, and finds a running Ray"
ROUTER = "the replica of a request is chosen by its tokens"

SEAMS: dict[str, Seam] = {
    "haproxy": Seam(
        "ray.serve._private", "limits and errors of HAProxy stand in its template", "HAPROXY_CONFIG_TEMPLATE"
    ),
    "worker": Seam("ray._private", "the folder of a session", "_global_node"),
    "_get_global_client": Seam("ray.serve.context", "the address of Ray Serve, and deploys of a config"),
    "api": Seam("ray.serve._private", "models load while proxies start", "_create_controller_and_proxy_refs"),
    "get_ray_address_file": Seam("ray._common.utils", START),
    "read_ray_address": Seam("ray._private.utils", START),
    "generate_new_authentication_token": Seam(
        "ray._private.authentication.authentication_token_generator", START
    ),
    "ReplicaID": Seam("ray.serve.request_router", ROUTER, "unique_id"),
    "PendingRequest": Seam("ray.serve.request_router", ROUTER, "args future routing_context"),
    "RunningReplica": Seam("ray.serve.request_router", ROUTER, "replica_id routing_stats replica_metadata"),
    "RequestRouter": Seam(
        "ray.serve.request_router",
        ROUTER,
        "initialize_state update_replicas choose_replicas on_replica_actor_died on_request_routed",
    ),
}
"""Names that are not public, and parts of Ray's router that change from version to version."""


def check() -> None:
    """Look for all names in the installed Ray.

    Raises:
        RuntimeError: It has some of them no more; the error has them all, with the use of each.
    """
    import ray

    look_for(SEAMS, "Ray", tuple(int(number) for number in ray.__version__.split(".")[:2]))


def __getattr__(name: str) -> Any:
    """Import a name of `SEAMS`."""
    return load(SEAMS, name)
