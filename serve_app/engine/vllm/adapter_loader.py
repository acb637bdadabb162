"""The LoRA adapters that a vLLM engine has.

The imports are those of vLLM 0.32.
"""

import asyncio
import itertools
import logging
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from vllm.lora.request import LoRARequest

from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.adapter_files import Adapter, AdapterError, Shapes, check, layer_shapes
from serve_app.engine.adapter_slots import AdapterSlots
from serve_app.engine.vllm.adapter_trial import try_adapter
from serve_app.engine.vllm.adapter_worker import UNUSED
from serve_app.ledger.calls import CallBook
from serve_app.settings.adapters import AdapterSettings

logger = logging.getLogger("ray.serve")

TRIAL_S = 120.0
"""Seconds that the trial of an adapter may take, the wait for a slot included."""

SHOWN = 5
"""Most names of tensors in a message."""


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
        slots: The adapters that have requests.
        book: Gets the work of the trials.
        simulated: The device is simulated: the model has no layers to compare with, and nothing to try.
    """

    def __init__(
        self,
        llm: Any,
        files: AdapterFiles,
        fetched: Mapping[str, Adapter],
        slots: AdapterSlots,
        book: CallBook,
        *,
        simulated: bool,
    ) -> None:
        self._llm = llm
        self._files = files
        self._fetched = dict(fetched)
        self._slots = slots
        self._book = book
        self._simulated = simulated
        self._shapes: Shapes | None = None
        self._known_shapes = simulated
        self._numbers = itertools.count(1)
        self._dropping: set[asyncio.Task[None]] = set()

    async def load(self, id: str, settings: AdapterSettings) -> LoadedAdapter:
        """Load an adapter, and try it.

        Raises:
            AdapterError: It can't be read, doesn't fit, or its arithmetic isn't finite; vLLM hasn't got it.
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
            largest = torch.finfo(config.lora_dtype).max
            await asyncio.to_thread(check, adapter, config.max_lora_rank, self._shapes, largest)
        except BaseException:
            shutil.rmtree(adapter.path, ignore_errors=True)
            raise
        request = LoRARequest(id, next(self._numbers), str(adapter.path))
        try:
            await self._add(request)
            if not self._simulated:
                await self._check_use(request)
                await self._try(request)
        except BaseException:
            # A load that was cancelled goes on in vLLM, and the removal comes behind it.
            self._dropping.add(task := asyncio.ensure_future(self._drop(request)))
            task.add_done_callback(self._dropping.discard)
            await asyncio.shield(task)
            raise
        return LoadedAdapter(settings, request)

    async def _add(self, request: LoRARequest) -> None:
        try:
            await self._llm.add_lora(request)
        except Exception as error:
            # An adapter that vLLM refuses is no fault of the service: its own words go to the client.
            if self._llm.errored:
                raise
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise AdapterError(f"is refused by vLLM: {reason[0]}") from None

    async def _check_use(self, request: LoRARequest) -> None:
        """Check that each tensor has a place in one of the workers."""
        found = await self._llm.collective_rpc(UNUSED, args=(request.lora_path,))
        if unused := sorted(set.intersection(*map(set, found))):
            more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
            raise AdapterError(
                f"has tensors that the model has no place for: {', '.join(unused[:SHOWN])}{more}. Their "
                "names are those of another base model, or two name the same matrix"
            )

    async def _try(self, request: LoRARequest) -> None:
        """Answer a request with the adapter."""
        # vLLM takes two adapters with one name for the same, and one may be served. No id has a space.
        trial = LoRARequest(f"trial of {request.lora_name}", request.lora_int_id, request.lora_path)
        try:
            async with asyncio.timeout(TRIAL_S), self._slots.using(trial.lora_name):
                await try_adapter(self._llm, trial, self._book)
        except TimeoutError:
            raise AdapterError(
                f"can't be tried: the engine was busy with requests of other adapters for {TRIAL_S:.0f} s. "
                "Load it again later, or raise engine.max_loras"
            ) from None
        finally:
            self._slots.remove(trial.lora_name)

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
        await self._drop(one.request)

    async def _drop(self, request: LoRARequest) -> None:
        try:
            await self._llm.remove_lora(request.lora_int_id)
        except Exception:
            # vLLM may still have it, and read its files again: they stay until the engine ends.
            logger.exception("the adapter %s could not be removed from vLLM", request.lora_name)
            return
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)

    async def close(self) -> None:
        """Delete the files of all adapters."""
        await asyncio.to_thread(self._files.close)


def _delete(fetching: "asyncio.Future[Adapter]") -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        shutil.rmtree(fetching.result().path, ignore_errors=True)
