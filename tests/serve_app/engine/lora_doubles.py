"""A vLLM engine that takes LoRA adapters, and sources of them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from serve_app.settings.adapters import AdapterSettings
from tests.serve_app.engine.adapters import write_adapter


class FakeLLM:
    """Stands for vLLM's engine.

    Attributes:
        loaded: Its adapters, by their numbers.
        pinned: The numbers of those that are pinned.
        refuse: It refuses every adapter.
        keep: It fails to remove any.
        unable: It fails to pin an adapter.
        removed: Set when an adapter is removed.
    """

    def __init__(self) -> None:
        lora = SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32)
        self.vllm_config = SimpleNamespace(lora_config=lora)
        self.errored = False
        self.loaded: dict[int, LoRARequest] = {}
        self.pinned: list[int] = []
        self.refuse = False
        self.keep = False
        self.unable = False
        self.removed = asyncio.Event()

    async def add_lora(self, request: LoRARequest) -> bool:
        assert has_files(request)
        if self.refuse:
            raise RuntimeError("Call to add_lora method failed:\nno such module")
        self.loaded[request.lora_int_id] = request
        return True

    async def remove_lora(self, number: int) -> bool:
        if self.keep:
            raise RuntimeError("Call to remove_lora method failed")
        self.removed.set()
        return self.loaded.pop(number, None) is not None

    async def pin_lora(self, number: int) -> bool:
        if self.unable:
            raise RuntimeError("the device is gone")
        self.pinned.append(number)
        return True

    @property
    def names(self) -> list[str]:
        return sorted(request.lora_name for request in self.loaded.values())


def has_files(request: LoRARequest) -> bool:
    """Return whether the copy of an adapter is there."""
    return (Path(request.lora_path) / "adapter_model.safetensors").is_file()


def source(tmp_path: Path, name: str, **fields: Any) -> AdapterSettings:
    """Return the settings of an adapter that is written as a source."""
    path = write_adapter(tmp_path / "sources" / name, **fields)
    return AdapterSettings(source=str(path), id=name)
