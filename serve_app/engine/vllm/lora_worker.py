"""A look at an adapter from inside vLLM's workers, by vLLM's option `worker_extension_cls`."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from serve_app.engine.adapters import WEIGHTS
from serve_app.engine.vllm.seams import (
    FusedMoE3DWithLoRA,
    is_base_embedding_weights,
    parse_fine_tuned_lora_name,
)

UNUSED = "saturate_unused_tensors"
"""The method of `LoRAWorker`, for `collective_rpc`."""


class LoRAWorker:
    """Methods that each worker of an engine with adapters has."""

    model_runner: Any

    def saturate_unused_tensors(self, path: str) -> list[str]:
        """Return the tensors of an adapter that have no place in this worker.

        vLLM compares the last part of a name only. It drops a tensor whose layer doesn't exist, and one of
        two tensors for the same matrix. A worker that holds some layers of the model returns the tensors of
        other layers too.

        Args:
            path: The directory of the adapter.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        model = manager.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        layers = set(manager.modules)
        for name in manager.modules:
            # The layers of the file that vLLM joins to one.
            layers.update(manager.packed_modules.get(name, ()))
            if isinstance(manager.modules[name], FusedMoE3DWithLoRA):
                layers.add(f"{name}.base_layer")
        if manager.is_pooling_model:
            layers |= {name.removeprefix("model.") for name in layers}
        # Heads that are replaced as a whole; vLLM checks them itself.
        layers |= manager.supported_modules_to_save
        with safe_open(Path(path, WEIGHTS), framework="np") as file:
            names = list(file.keys())
        unused, seen = [], set()
        for name in names:
            if is_base_embedding_weights(name):
                continue
            try:
                layer, is_first = parse_fine_tuned_lora_name(name, mapper)
            except ValueError:
                # vLLM has passed it over without a look, as it does with layers that it never runs.
                unused.append(name)
                continue
            # A head has a weight and a bias.
            matrix = (layer, is_first, name.rpartition(".")[2])
            if layer not in layers or matrix in seen:
                unused.append(name)
            seen.add(matrix)
        return unused
