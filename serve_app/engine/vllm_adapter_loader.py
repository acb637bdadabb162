"""The LoRA adapters that a vLLM engine has.

Only files named vllm_* import vllm. The imports are those of vLLM 0.32.
"""

import asyncio
import itertools
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from vllm.lora.request import LoRARequest

from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.adapter_files import Adapter, AdapterError, Shapes, check, layer_shapes
from serve_app.settings.adapters import AdapterSettings


class LoadedAdapter(NamedTuple):
    """An adapter in vLLM, with the settings that it was loaded for."""

    settings: AdapterSettings
    request: LoRARequest


class AdapterLoader:
    """Loads adapters into an engine, and unloads them.

    Args:
        llm: vLLM's engine.
        files: The files of the adapters.
        fetched: Adapters that are fetched already, by id.
        simulated: The device is simulated, and so the model has no layers to compare with.
    """

    def __init__(
        self, llm: Any, files: AdapterFiles, fetched: Mapping[str, Adapter], *, simulated: bool
    ) -> None:
        self._llm = llm
        self._files = files
        self._fetched = dict(fetched)
        self._shapes: Shapes | None = None
        self._known_shapes = simulated
        self._numbers = itertools.count(1)

    async def load(self, id: str, settings: AdapterSettings) -> LoadedAdapter:
        """Load an adapter.

        Raises:
            AdapterError: It can't be read, or doesn't fit.
        """
        adapter = self._fetched.pop(id, None)
        if adapter is None:
            adapter = await self._fetch(settings)
        try:
            config = self._llm.vllm_config.lora_config
            if not self._known_shapes:
                model = self._llm.model_config
                self._shapes = await asyncio.to_thread(layer_shapes, model.hf_config.get_text_config())
                self._known_shapes = True
            await asyncio.to_thread(check, adapter, config.max_lora_rank, self._shapes)
            request = LoRARequest(id, next(self._numbers), str(adapter.path))
            try:
                await self._llm.add_lora(request)
            except Exception as error:
                # The engine's own words, without its stack.
                reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                raise AdapterError(f"is refused by vLLM: {reason[0]}") from None
        except BaseException:
            shutil.rmtree(adapter.path, ignore_errors=True)
            raise
        return LoadedAdapter(settings, request)

    async def _fetch(self, settings: AdapterSettings) -> Adapter:
        fetching = asyncio.ensure_future(asyncio.to_thread(self._files.fetch, settings))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            # A thread can't be stopped: its copy is deleted once it is complete.
            fetching.add_done_callback(_delete)
            raise

    async def pin(self, one: LoadedAdapter) -> None:
        """Keep a loaded adapter on the device."""
        await self._llm.add_lora(one.request)
        await self._llm.pin_lora(one.request.lora_int_id)

    async def unload(self, one: LoadedAdapter) -> None:
        """Unload an adapter and delete its files."""
        with suppress(Exception):
            await self._llm.remove_lora(one.request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, one.request.lora_path, ignore_errors=True)

    async def close(self) -> None:
        """Delete the files of all adapters."""
        await asyncio.to_thread(self._files.close)


def _delete(fetching: "asyncio.Future[Adapter]") -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        shutil.rmtree(fetching.result().path, ignore_errors=True)
