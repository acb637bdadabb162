"""The LoRA adapters of an engine: those that are wanted, and those that vLLM has.

Only files named vllm_* import vllm. The imports are those of vLLM 0.32.
"""

import asyncio
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from vllm.lora.request import LoRARequest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.engine.adapter_files import Adapter, AdapterError, Shapes, check, fetch, layer_shapes
from serve_app.engine.adapter_folder import AdapterFolder, FolderError
from serve_app.engine.adapter_slots import AdapterSlots
from serve_app.settings.adapters import AdapterSettings, adapters_by_id, check_pinned
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError

logger = logging.getLogger("ray.serve")

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `max_lora_rank`."""

USUAL_RANK = 16
"""The least of it, unless the config has one."""

RETRY_S = 30.0
"""Seconds after which an adapter of the folder that couldn't be loaded is tried again."""

FOLLOW_S = 2.0
"""Seconds between two looks at the folder."""

NO_FOLDER = "can't be kept: the model has no adapters_folder"

LEAVE_S = 60.0
"""Seconds in which the requests of an adapter that was removed may end before another gets its id."""


COPIES = "saturate-adapters-"
"""Prefix of the name of a directory of copies; the id of its process follows."""


class _Loaded(NamedTuple):
    """An adapter in vLLM, with the settings that it was loaded for."""

    settings: AdapterSettings
    request: LoRARequest


class AdapterFiles:
    """Adapters that were fetched into a directory of this process."""

    def __init__(self) -> None:
        _remove_left_behind()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{COPIES}{os.getpid()}-"))
        self._numbers = itertools.count()

    def fetch(self, settings: AdapterSettings) -> Adapter:
        """Fetch an adapter into a directory that no other has had.

        Raises:
            AdapterError: It can't be read.
        """
        path = self._folder / str(next(self._numbers))
        try:
            return fetch(settings.location, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def close(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _remove_left_behind() -> None:
    """Delete the directories of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{COPIES}*-*"):
        pid = folder.name.removeprefix(COPIES).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def lora_options(settings: LLMSettings, files: AdapterFiles) -> tuple[dict[str, Any], dict[str, Adapter]]:
    """Return vLLM's options for the adapters of a model, as far as the config leaves them out.

    Args:
        settings: The model.
        files: Gets the files of the adapters.

    Returns:
        The options, and the adapters of the config by id.

    Raises:
        SettingsError: An adapter of the config can't be read.
    """
    if not settings.has_adapters:
        return {}, {}
    fetched = {}
    for id, adapter in adapters_by_id(settings.id, settings.adapters).items():
        try:
            fetched[id] = files.fetch(adapter)
        except AdapterError as error:
            raise SettingsError(f"models[{settings.id}].adapters: {id} ({adapter.source}) {error}") from None
    most = max([USUAL_RANK, *(adapter.rank for adapter in fetched.values())])
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": settings.slots,
        "max_cpu_loras": settings.cpu_slots,
        "max_lora_rank": settings.engine.max_lora_rank or next((r for r in RANKS if r >= most), RANKS[-1]),
    }
    return options, fetched


class Adapters:
    """The adapters of one engine.

    Args:
        settings: The model.
        llm: vLLM's engine.
        files: The files of the adapters.
        fetched: Adapters of the config that are fetched already, by id.

    Attributes:
        requests: What vLLM's application looks an adapter up in, by id.
        slots: The adapters that have requests.
    """

    def __init__(
        self,
        settings: LLMSettings,
        llm: Any,
        files: AdapterFiles,
        fetched: Mapping[str, Adapter],
    ) -> None:
        self._settings = settings
        self._llm = llm
        self._files = files
        self._fetched = dict(fetched)
        self._declared = adapters_by_id(settings.id, settings.adapters)
        place = settings.adapters_folder
        self._folder = AdapterFolder(place, settings.id) if place else None
        self._shapes: Shapes | None = None
        self._known_shapes = settings.simulate is not None
        self._numbers = itertools.count(1)
        self._loaded: dict[str, _Loaded] = {}
        # Loaded, and not served yet.
        self._prepared: dict[str, _Loaded] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        # When an adapter of the folder was refused.
        self._refused: dict[tuple[str, AdapterSettings], float] = {}
        self._lock = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self.requests: dict[str, LoRARequest] = {}
        self.slots = AdapterSlots(settings.slots)

    def __contains__(self, id: str) -> bool:
        return id in self._loaded

    async def start(self) -> None:
        """Load the adapters of the config and those of the folder.

        Raises:
            SettingsError: One of the config doesn't fit.
            FolderError: The folder can't be read.
        """
        if self._settings.has_adapters:
            async with self._lock:
                await self._settle(self._declared, await self._read(), strict=True)
        if self._folder is not None:
            self._following = asyncio.create_task(self._follow())

    async def declare(self, adapters: tuple[AdapterSettings, ...] | None) -> None:
        """Take over the adapters of the `user_config`; None: those of `args` hold.

        Raises:
            SettingsError: One doesn't fit; nothing has changed.
        """
        wanted = self._settings.adapters if adapters is None else adapters
        if wanted and not self._settings.has_adapters:
            raise SettingsError("user_config.adapters: the engine was started without engine.enable_lora")
        try:
            declared = adapters_by_id(self._settings.id, wanted)
            check_pinned(self._settings.slots, wanted)
        except ValueError as error:
            raise SettingsError(f"user_config.{error}") from None
        async with self._lock:
            if declared == self._declared:
                return
            await self._settle(declared, await self._read(), strict=True)

    async def refresh(self, *, drop: bool = True) -> None:
        """Take over what the folder has now. An adapter that can't be loaded is logged.

        Args:
            drop: Drop adapters that were prepared and aren't there. Without, they may be on their way.

        Raises:
            FolderError: The folder can't be read.
        """
        if self._folder is not None:
            async with self._lock:
                await self._settle(self._declared, await self._read())
                if drop:
                    await self._drop_prepared()

    async def prepare(self, id: str, settings: AdapterSettings) -> None:
        """Load an adapter that isn't served yet: `refresh` serves it if it is in the folder, or drops it.

        Raises:
            AdapterError: It can't be loaded.
        """
        if self._folder is None:
            raise AdapterError(NO_FOLDER)
        async with self._lock:
            if id in self._loaded:
                raise AdapterError("is loaded already; unload it first")
            pinned = [one.settings for one in self._loaded.values()]
            try:
                check_pinned(self._settings.slots, [*pinned, settings])
            except ValueError as error:
                raise AdapterError(str(error)) from None
            if before := self._prepared.pop(id, None):
                await self._unload(id, before)
            self._prepared[id] = await self._load(id, settings)

    async def keep(self, id: str, settings: AdapterSettings | None) -> str:
        """Write an adapter to the folder, or remove it from there (None).

        Returns:
            The reason why it can't be; empty: it is done.
        """
        if (folder := self._folder) is None:
            return NO_FOLDER
        try:
            if settings is None:
                await asyncio.to_thread(folder.remove, id)
            else:
                await asyncio.to_thread(folder.write, id, settings)
        except FolderError as error:
            return str(error)
        return ""

    async def check(self, id: str) -> None:
        """Raise a RequestError if an adapter isn't served: 404."""
        if id not in self._loaded:
            # It may have been loaded while this replica started.
            with suppress(FolderError):
                await self.refresh(drop=False)
        if id not in self._loaded:
            raise self.missing(id)

    def report(self) -> list[JSON]:
        """Return the adapters that are served, as `/stats` shows them."""
        resident = set(self.slots.resident)
        return [
            {
                "id": id,
                "root": one.settings.root,
                "pinned": one.settings.pinned,
                "declared": id in self._declared,
                "resident": id in resident,
            }
            for id, one in self._loaded.items()
        ]

    @asynccontextmanager
    async def using(self, request: LoRARequest | None) -> AsyncIterator[None]:
        """Hold an adapter while vLLM has a request for it.

        Raises:
            RequestError: 404, it was removed meanwhile.
        """
        if request is None:
            yield
            return
        id = request.lora_name
        if self.requests.get(id) is request:
            async with self.slots.using(id):
                if self.requests.get(id) is request:
                    yield
                    return
        raise self.missing(id)

    def missing(self, id: str) -> RequestError:
        """Return the error of a request for an adapter that isn't served."""
        there = ", ".join([self._settings.id, *self._loaded])
        message = f"The model {id!r} does not exist; served here: {there}"
        return RequestError(404, "not_found_error", message, param="model")

    async def close(self) -> None:
        """Delete the files."""
        for task in (self._following, *self._leaving.values()):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._files.close)

    async def _follow(self) -> None:
        """Take over what the folder has, again and again: this replica may have missed a call to do so."""
        failed = False
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await self.refresh(drop=False)
            except FolderError as error:
                if not failed:
                    logger.error("the adapters stay as they were: %s", error)
                failed = True
            else:
                failed = False

    async def _read(self) -> Mapping[str, AdapterSettings]:
        return {} if self._folder is None else await asyncio.to_thread(self._folder.read)

    async def _settle(
        self,
        declared: Mapping[str, AdapterSettings],
        kept: Mapping[str, AdapterSettings],
        strict: bool = False,
    ) -> None:
        """Load what is wanted and isn't there, then drop what isn't wanted.

        Args:
            declared: Adapters of the config, which go before those of the folder.
            kept: Those of the folder.
            strict: Whether one of the config that doesn't fit is an error.

        Raises:
            SettingsError: It is; nothing has changed.
        """
        wanted = {**kept, **declared}
        changed = {id for id, one in self._loaded.items() if id in wanted and wanted[id] != one.settings}
        try:
            for id, settings in wanted.items():
                ready = self._prepared.get(id)
                if (id in self._loaded and id not in changed) or (ready and ready.settings == settings):
                    continue
                now = time.monotonic()
                if now < self._refused.get((id, settings), -RETRY_S) + RETRY_S:
                    continue
                try:
                    if ready:
                        await self._unload(id, self._prepared.pop(id))
                    self._prepared[id] = await self._load(id, settings)
                except AdapterError as error:
                    if strict and id in declared:
                        raise SettingsError(f"adapters: {id} ({settings.source}) {error}") from None
                    self._refused[id, settings] = now
                    logger.error("the adapter %s (%s) is not served: it %s", id, settings.source, error)
        except BaseException:
            await self._drop_prepared()
            raise
        self._refused = {one: at for one, at in self._refused.items() if wanted.get(one[0]) == one[1]}
        self._declared = dict(declared)
        for id in list(self._loaded):
            if id not in wanted or id in self._prepared:
                self._remove(id)
        for id in list(self._prepared):
            if id not in wanted:
                continue
            if leaving := self._leaving.get(id):
                # vLLM takes two adapters with one name for the same.
                await asyncio.wait([leaving], timeout=LEAVE_S)
                if not leaving.done():
                    logger.warning("the adapter %s still has requests for the one before it", id)
                    continue
            await self._serve(id, self._prepared.pop(id))

    async def _load(self, id: str, settings: AdapterSettings) -> _Loaded:
        """Load an adapter into vLLM.

        Raises:
            AdapterError: It can't be.
        """
        adapter = self._fetched.pop(id, None)
        if adapter is None:
            adapter = await asyncio.to_thread(self._files.fetch, settings)
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
        return _Loaded(settings, request)

    async def _serve(self, id: str, one: _Loaded) -> None:
        self._loaded[id] = one
        self.requests[id] = one.request
        if one.settings.pinned:
            async with self.slots.using(id):
                await self._llm.add_lora(one.request)
                await self._llm.pin_lora(one.request.lora_int_id)
                self.slots.pin(id)
        logger.info("the adapter %s (%s) is served", id, one.settings.source)

    def _remove(self, id: str) -> None:
        """Serve an adapter no longer; it leaves vLLM when its requests have ended."""
        one = self._loaded.pop(id)
        del self.requests[id]
        self._leaving[id] = task = asyncio.ensure_future(self._leave(id, one))
        task.add_done_callback(lambda _: self._leaving.pop(id, None))
        logger.info("the adapter %s is not served any more", id)

    async def _leave(self, id: str, one: _Loaded) -> None:
        await self.slots.left(id)
        self.slots.remove(id)
        await self._unload(id, one)

    async def _unload(self, id: str, one: _Loaded) -> None:
        with suppress(Exception):
            await self._llm.remove_lora(one.request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, one.request.lora_path, ignore_errors=True)

    async def _drop_prepared(self) -> None:
        while self._prepared:
            await self._unload(*self._prepared.popitem())
