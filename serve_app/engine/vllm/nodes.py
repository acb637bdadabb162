"""An executor of vLLM over several nodes of Ray: its workers are actors in the bundles of the replica.

vLLM's own executor wants a bundle for each GPU. Ray may then split the GPUs of a stage between nodes where
other replicas have a part of them. Here a bundle has all GPUs that the replica takes on a node: Ray never
splits a bundle, so that the layers of a stage are exchanged within a node.
"""

import os
from collections.abc import Callable
from typing import Any

import ray
from ray.util import get_current_placement_group, placement_group_table
from vllm.platforms import current_platform

from serve_app.engine.vllm import seams
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError

Place = tuple[int, str, str]
"""Place of a worker: the index of its bundle, the id of the bundle's node, the address of the node."""


def prepare(settings: LLMSettings) -> None:
    """Check that this replica has bundles for its workers, and have the engine's process find its Ray.

    Raises:
        SettingsError: The workers would wait for GPUs for ever.
    """
    where = f"deployments: Engine:{settings.id}"
    if (group := get_current_placement_group()) is None:
        raise SettingsError(
            f"{where}: placement_group_bundles: must have bundles for {settings.nodes} nodes, or be left out"
        )
    if held := ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        raise SettingsError(
            f"{where}: ray_actor_options.num_gpus: leave it out; the replica holds {len(held)} of the GPUs "
            "that belong to its workers"
        )
    count = len(_bundles(group))
    if not count or settings.processes % count:
        raise SettingsError(
            f"{where}: placement_group_bundles: {settings.processes} GPUs of tensor_parallel_size and "
            f"pipeline_parallel_size can't have equal parts in {count} bundles with GPUs"
        )
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


def _bundles(group: Any) -> list[int]:
    """Return the indexes of the bundles for workers: those with a GPU; on a CPU, all bundles."""
    key = current_platform.ray_device_key
    return [index for index, bundle in enumerate(group.bundle_specs) if not key or bundle.get(key)]


def _connect(config: Any, *_: Any, **__: Any) -> None:
    """Connect the engine's process to the Ray of its replica."""
    if not ray.is_initialized():
        ray.init(address=os.environ["RAY_ADDRESS"], runtime_env=config.ray_runtime_env)


def _places(group: Any) -> list[Place]:
    """Return the places of the workers by rank: those of the replica's node first, then node by node."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    # Ray Serve puts the replica into the first bundle.
    bundles = sorted(_bundles(group), key=lambda index: (nodes[index] != nodes[0], nodes[index], index))
    return [(index, nodes[index], addresses[nodes[index]]) for index in bundles]


class NodeWorker(seams.ray_executor_v2.RayWorkerProc):  # type: ignore[misc]
    """A worker of vLLM, as an actor of Ray."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Return the node of this worker, and its GPUs; vLLM's own method raises on a CPU."""
        if not current_platform.ray_device_key:
            return ray.get_runtime_context().get_node_id(), []
        found: tuple[str, list[int]] = super().get_node_and_physical_gpu_ids()
        return found


class NodesExecutor(seams.ray_executor_v2.RayExecutorV2):  # type: ignore[misc]
    """vLLM's executor for Ray, with several workers in a bundle."""

    def _init_executor(self) -> None:
        def places(group: Any) -> list[Place]:
            found = _places(group)
            share = self.world_size // len(found)
            return [place for place in found for _ in range(share)]

        # The process of an engine has one executor.
        vllms = seams.ray_executor_v2
        vllms.initialize_ray_cluster = _connect
        vllms.get_bundles_sorted_by_node = places
        vllms.RayWorkerProc = NodeWorker
        super()._init_executor()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Have the engine's process end when a worker has died.

        The engine may wait for a message of that worker over TCP, which vLLM can't cancel: it would hang for
        as long as `engine_hang_timeout_s`.
        """

        def end() -> None:
            callback()
            os._exit(1)

        super().register_failure_callback(end)

    def compile_or_warm_up_model(self) -> None:
        """Warm the workers up; on a CPU vLLM may skip the step in which a stage makes its buffers."""
        super().compile_or_warm_up_model()
        if not current_platform.ray_device_key:
            self.execute_dummy_batch()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        if not current_platform.ray_device_key:
            return {"num_gpus": 0}
        found: dict[str, Any] = seams.ray_executor_v2.RayExecutorV2._get_actor_resource_kwargs()
        return found
