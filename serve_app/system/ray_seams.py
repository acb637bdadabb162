"""Names of Ray that aren't public, with the use of each, and a guard; see `serve_app.system.seams`.

Public is what Ray's documentation names, its alpha points included, as the router of requests. No name is
imported before it is asked for: Ray Serve reads its environment when a process imports it.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from serve_app.system.seams import Seam, load, look_for

START = "a service starts in a folder that others can't read, and finds a running Ray"
ROUTER = "the replica of a request is chosen by its tokens"

TEMPLATES = "haproxy_templates"

SEAMS: dict[str, Seam] = {
    TEMPLATES: Seam(
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


def haproxy_templates() -> ModuleType:
    """Load the module of HAProxy's templates without the rest of Ray Serve, which takes a second of a core.

    Each process of Ray calls this, and few of them load Ray Serve.

    Raises:
        RuntimeError: Ray Serve has no such module.
    """
    import ray

    name = f"{SEAMS[TEMPLATES].module}.{TEMPLATES}"
    path = Path(ray.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise RuntimeError(f"Ray has no {name}; install the version that pyproject.toml names")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def __getattr__(name: str) -> Any:
    """Import a name of `SEAMS`."""
    return load(SEAMS, name)
