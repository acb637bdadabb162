"""The LoRA adapters that an engine serves: those of its config and those of its folder.

The imports are those of vLLM 0.32.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from vllm.lora.request import LoRARequest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.adapter_files import Adapter, AdapterError
from serve_app.engine.adapter_folder import AdapterFolder, FolderError
from serve_app.engine.adapter_slots import AdapterSlots
from serve_app.engine.vllm.adapter_loader import AdapterLoader, LoadedAdapter
from serve_app.ledger.calls import CallBook
from serve_app.settings.adapters import AdapterSettings, adapters_by_id, check_pinned
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.system.rounds import Rounds

logger = logging.getLogger("ray.serve")

RETRY_S = 30.0
"""Seconds after which an adapter of the folder that couldn't be loaded is tried again."""

FOLLOW_S = 2.0
"""Seconds between two looks at the folder."""

NO_FOLDER = "can't be kept: the model has no adapters_folder"

LEAVE_S = 60.0
"""Seconds in which the requests of an adapter that was removed may end before another gets its id."""


class Adapters:
    """The adapters of one engine.

    Args:
        settings: The model.
        llm: vLLM's engine.
        files: The files of the adapters.
        fetched: Adapters of the config that are fetched already, by id.
        book: Gets the work of the trials.

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
        book: CallBook,
    ) -> None:
        self._settings = settings
        self.slots = AdapterSlots(settings.slots)
        self._loader = AdapterLoader(
            llm, files, fetched, self.slots, book, simulated=settings.simulate is not None
        )
        self._declared = adapters_by_id(settings.id, settings.adapters)
        place = settings.adapters_folder
        self._folder = AdapterFolder(place, settings.id) if place else None
        self._loaded: dict[str, LoadedAdapter] = {}
        # Loaded, and not served yet.
        self._prepared: dict[str, LoadedAdapter] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        # When an adapter of the folder was refused.
        self._refused: dict[tuple[str, AdapterSettings], float] = {}
        self._lock = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self.requests: dict[str, LoRARequest] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._loaded

    async def start(self, follow_s: float = FOLLOW_S) -> None:
        """Load the adapters of the config and those of the folder.

        Args:
            follow_s: Seconds between two looks at the folder from then on.

        Raises:
            SettingsError: One of the config doesn't fit.
            FolderError: The folder can't be read.
        """
        if self._settings.has_adapters:
            async with self._lock:
                await self._settle(self._declared, await self._read(), strict=True)
        if self._folder is not None:
            self._following = asyncio.create_task(self._follow(follow_s))

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
                await self._loader.unload(before)
            self._prepared[id] = await self._loader.load(id, settings)

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
        await self._loader.close()

    async def _follow(self, follow_s: float) -> None:
        """Take over what the folder has, again and again: this replica may have missed a call to do so."""
        failed = False
        rounds = Rounds("the look at the folder of the adapters")
        while True:
            await asyncio.sleep(follow_s)
            with rounds.round():
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
                        await self._loader.unload(self._prepared.pop(id))
                    self._prepared[id] = await self._loader.load(id, settings)
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

    async def _serve(self, id: str, one: LoadedAdapter) -> None:
        self._loaded[id] = one
        self.requests[id] = one.request
        if one.settings.pinned:
            async with self.slots.using(id):
                await self._loader.pin(one)
                self.slots.pin(id)
        logger.info("the adapter %s (%s) is served", id, one.settings.source)

    def _remove(self, id: str) -> None:
        """Serve an adapter no longer; it leaves vLLM when its requests have ended."""
        one = self._loaded.pop(id)
        del self.requests[id]
        self._leaving[id] = task = asyncio.ensure_future(self._leave(id, one))
        task.add_done_callback(lambda _: self._leaving.pop(id, None))
        logger.info("the adapter %s is not served any more", id)

    async def _leave(self, id: str, one: LoadedAdapter) -> None:
        await self.slots.left(id)
        self.slots.remove(id)
        await self._loader.unload(one)

    async def _drop_prepared(self) -> None:
        while self._prepared:
            _, one = self._prepared.popitem()
            await self._loader.unload(one)
