"""The LoRA adapters of a vLLM engine: loaded, tried, served, unloaded.

vLLM's `LoRAResolver` doesn't fit: vLLM gives an adapter that it resolves a
number of its own, loads it without a trial, never forgets it, and lists no adapter that nobody has asked for.
"""

import asyncio
import itertools
import logging
import math
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.engine.adapters import (
    Adapter,
    AdapterError,
    AdapterFiles,
    AdapterFolder,
    AdapterSlots,
    FolderError,
)
from serve_app.engine.vllm.lora_worker import UNUSED
from serve_app.engine.vllm.stats import own_work
from serve_app.engine.vllm.warm_up import POOLING
from serve_app.ledger.calls import CallBook
from serve_app.settings.adapters import AdapterSettings, adapters_by_id
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.system.rounds import Rounds

logger = logging.getLogger("ray.serve")

WORKER = "serve_app.engine.vllm.lora_worker.LoRAWorker"
"""The look at adapters inside vLLM's workers."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `max_lora_rank`."""

USUAL_RANK = 16
"""The least `max_lora_rank`, unless the config has one."""

RETRY_S = 30.0
"""Seconds after which an adapter of the folder that couldn't be loaded is tried again."""

FOLLOW_S = 2.0
"""Seconds between two looks at the folder."""

LEAVE_S = 60.0
"""Seconds in which the requests of an adapter that was removed may end before another gets its id."""

TRIAL_S = 120.0
"""Seconds that the trial of an adapter may take, the wait for a slot included."""

TRIAL_TEXT = (
    'What is 47+28? The quick brown fox jumps over the lazy dog: 3.14, (6*7) = 42; "Straße" & {x: [1, 2]} '
    "<a href='#'>@home</a> | 100% ~ $5_000 \\ ^ `ÀÉ漢字あ한`!\n"
)
"""The text of the trial: letters, digits and signs of many kinds."""

TRIAL_TOKENS = 64
"""Tokens of it, at most: the logits of each take memory of the device."""

SHOWN = 5
"""Maximum names of tensors in a message."""

NO_FOLDER = "can't be kept: the model has no adapters_folder"


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
            fetched[id] = files.fetch(adapter.location)
        except AdapterError as error:
            raise SettingsError(f"models[{settings.id}].adapters: {id} ({adapter.source}) {error}") from None
    most = max([USUAL_RANK, *(adapter.rank for adapter in fetched.values())])
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": settings.slots,
        "max_cpu_loras": settings.cpu_slots,
        "max_lora_rank": settings.engine.max_lora_rank or next((r for r in RANKS if r >= most), RANKS[-1]),
    }
    if settings.simulate is None:
        options["worker_extension_cls"] = WORKER
    return options, fetched


class Loaded(NamedTuple):
    """An adapter in vLLM, with the settings that it was loaded for."""

    settings: AdapterSettings
    request: LoRARequest


class Adapters:
    """The adapters of one engine, which come from its config and from its folder.

    An adapter is *prepared* once vLLM has it and a trial request was answered, *served* while requests may
    name it, and *leaving* until its last request has ended.

    Args:
        settings: The model.
        llm: vLLM's engine.
        files: The files of the adapters.
        fetched: Adapters of the config that are fetched already, by id.
        book: Gets the work of the trials.
        clock: Monotonic clock, in seconds.
        awake: Holds the device for a change in vLLM: a model that shares its device may sleep, and its memory
            is not there then.

    Attributes:
        requests: What vLLM's application looks an adapter up in, by id.
        slots: The places of the adapters, as lanes of the batcher.
    """

    def __init__(
        self,
        settings: LLMSettings,
        llm: Any,
        files: AdapterFiles,
        fetched: Mapping[str, Adapter],
        book: CallBook,
        *,
        clock: Callable[[], float] = time.monotonic,
        awake: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> None:
        self.requests: dict[str, LoRARequest] = {}
        self.slots = AdapterSlots(settings.slots)
        self._settings = settings
        self._llm = llm
        self._files = files
        self._fetched = dict(fetched)
        self._book = book
        self._clock = clock
        self._awake = awake
        # A simulated device has no layers, and nothing to try.
        self._simulated = settings.simulate is not None
        self._numbers = itertools.count(1)
        self._declared = adapters_by_id(settings.id, settings.adapters)
        place = settings.adapters_folder
        self._folder = AdapterFolder(place, settings.id) if place else None
        self._served: dict[str, Loaded] = {}
        self._prepared: dict[str, Loaded] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        # When an adapter of the folder was refused.
        self._refused: dict[tuple[str, AdapterSettings], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    # Adapters that are served

    def lora_request(self, id: str) -> LoRARequest:
        """Return vLLM's name of an adapter.

        Raises:
            RequestError: 404, the adapter isn't served (any more).
        """
        if (request := self.requests.get(id)) is None:
            # No list: the API key of the request may not use all adapters.
            message = f"The model {id!r} does not exist; GET /v1/models lists all that do"
            raise RequestError(404, "not_found_error", message, param="model")
        return request

    async def check(self, id: str) -> None:
        """Raise a RequestError if an adapter isn't served: 404."""
        if id not in self.requests:
            # It may have been loaded while this replica started.
            with suppress(FolderError):
                await self.refresh(drop=False)
        self.lora_request(id)

    def report(self) -> list[JSON]:
        """Return the adapters that are served, as `/stats` shows them."""
        resident = set(self.slots.resident)
        return [
            {
                "id": id,
                "root": one.settings.root,
                "declared": id in self._declared,
                "resident": id in resident,
            }
            for id, one in self._served.items()
        ]

    # Changes

    async def start(self, follow_s: float = FOLLOW_S) -> None:
        """Serve the adapters of the config and of the folder, and follow the folder from then on.

        Args:
            follow_s: Seconds between two looks at the folder: this replica may miss a call to `refresh`.

        Raises:
            SettingsError: An adapter of the config doesn't fit.
            FolderError: The folder can't be read.
        """
        if self._settings.has_adapters:
            async with self._lock:
                await self._settle(self._declared, strict=True)
        if self._folder is not None:
            self._run(self._follow(follow_s))

    async def _follow(self, follow_s: float) -> None:
        rounds = Rounds("the look at the folder of the adapters")
        while True:
            await asyncio.sleep(follow_s)
            with rounds.round():
                await self.refresh(drop=False)

    async def declare(self, adapters: tuple[AdapterSettings, ...] | None) -> None:
        """Take over the adapters of the `user_config`; None: the adapters of `args`.

        Raises:
            SettingsError: An adapter doesn't fit; nothing has changed.
        """
        wanted = self._settings.adapters if adapters is None else adapters
        if wanted and not self._settings.has_adapters:
            raise SettingsError("user_config.adapters: the engine was started without engine.enable_lora")
        try:
            declared = adapters_by_id(self._settings.id, wanted)
        except ValueError as error:
            raise SettingsError(f"user_config.{error}") from None
        async with self._lock:
            if declared != self._declared:
                await self._settle(declared, strict=True)

    async def refresh(self, *, drop: bool = True) -> None:
        """Take over the adapters that the folder has now. An adapter that can't be loaded is logged.

        Args:
            drop: Drop adapters that were prepared and aren't there. Without, they may be on their way.

        Raises:
            FolderError: The folder can't be read.
        """
        if self._folder is not None:
            async with self._lock:
                await self._settle(self._declared)
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
            if id in self._served:
                raise AdapterError("is loaded already; unload it first")
            await self._prepare(id, settings)

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

    async def close(self) -> None:
        """Delete the files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._files.close)

    async def _settle(self, declared: Mapping[str, AdapterSettings], strict: bool = False) -> None:
        """Load wanted adapters that are missing, then drop unwanted adapters.

        Args:
            declared: Adapters of the config, which go before the folder's.
            strict: An adapter of the config that doesn't fit is an error.

        Raises:
            FolderError: The folder can't be read; nothing has changed.
            SettingsError: An adapter of the config doesn't fit; nothing has changed.
        """
        kept = {} if self._folder is None else await asyncio.to_thread(self._folder.read)
        wanted = {**kept, **declared}
        try:
            for id, settings in wanted.items():
                have = self._prepared.get(id) or self._served.get(id)
                now = self._clock()
                retry_at = self._refused.get((id, settings), -math.inf) + RETRY_S
                if (have and have.settings == settings) or now < retry_at:
                    continue
                try:
                    await self._prepare(id, settings)
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
        for id in list(self._served):
            if id not in wanted or id in self._prepared:
                one = self._served.pop(id)
                del self.requests[id]
                self._leaving[id] = self._run(self._leave(id, one))
                logger.info("the adapter %s is not served any more", id)
        for id in [id for id in self._prepared if id in wanted]:
            if leaving := self._leaving.get(id):
                # vLLM takes two adapters with one name for the same.
                await asyncio.wait([leaving], timeout=LEAVE_S)
                if not leaving.done():
                    logger.warning("the adapter %s still has requests for the one before it", id)
                    continue
            one = self._prepared[id]
            self._served[id] = self._prepared.pop(id)
            self.requests[id] = one.request
            logger.info("the adapter %s (%s) is served", id, one.settings.source)

    async def _leave(self, id: str, one: Loaded) -> None:
        """Unload an adapter when its requests have ended."""
        try:
            await self.slots.left(id)
            self.slots.remove(id)
            await self._unload(one.request)
        finally:
            del self._leaving[id]

    async def _drop_prepared(self) -> None:
        while self._prepared:
            _, one = self._prepared.popitem()
            await self._unload(one.request)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)
        return task

    # In vLLM

    async def _prepare(self, id: str, settings: AdapterSettings) -> None:
        """Load an adapter and try it; an adapter that was prepared by the same id is unloaded.

        Raises:
            AdapterError: It can't be read, doesn't fit, or its arithmetic isn't finite; vLLM hasn't got it.
        """
        if before := self._prepared.pop(id, None):
            await self._unload(before.request)
        adapter = self._fetched.pop(id, None) or await self._fetch(settings)
        request = LoRARequest(id, next(self._numbers), str(adapter.path))
        try:
            async with self._awake():
                await self._add(request)
                if not self._simulated:
                    await self._check_use(request)
                    await self._try(request)
        except BaseException:
            # A load that was cancelled goes on in vLLM, and the removal comes behind it.
            await asyncio.shield(self._run(self._unload(request)))
            raise
        self._prepared[id] = Loaded(settings, request)

    async def _fetch(self, settings: AdapterSettings) -> Adapter:
        fetching = asyncio.ensure_future(asyncio.to_thread(self._files.fetch, settings.location))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            # A thread can't be stopped: its copy is deleted once it is complete.
            def delete(done: "asyncio.Future[Adapter]") -> None:
                if not done.cancelled() and done.exception() is None:
                    shutil.rmtree(done.result().path, ignore_errors=True)

            fetching.add_done_callback(delete)
            raise

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
                "names belong to another base model, or two name the same matrix"
            )

    async def _try(self, request: LoRARequest) -> None:
        """Answer a request with the adapter, and look at all numbers of the answer.

        The request goes past the batcher, as the warm-up does: it is short, and there is one at a time.
        """
        # vLLM takes two adapters with one name for the same, and one may be served. No id has a space.
        trial = LoRARequest(f"trial of {request.lora_name}", request.lora_int_id, request.lora_path)
        try:
            async with asyncio.timeout(TRIAL_S), self.slots.claim(trial.lora_name):
                finite = await self._answer(trial)
        except TimeoutError:
            raise AdapterError(
                f"can't be tried: the engine was busy with requests of other adapters for {TRIAL_S:.0f} s. "
                "Load it again later, or raise engine.max_loras"
            ) from None
        except (VLLMClientError, ValueError) as error:
            raise AdapterError(
                f"can't be tried, since the engine refuses the trial request: {error}"
            ) from None
        finally:
            self.slots.remove(trial.lora_name)
        if not finite:
            raise AdapterError(
                "gives numbers that are not finite (NaN): a trial request with it failed. Its matrices or "
                "its lora_alpha are too large for the engine's numbers (engine.dtype), or it is for another "
                "model"
            )

    async def _answer(self, trial: LoRARequest) -> bool:
        """Return whether all numbers of an answer are finite: its logprobs, or its vectors."""
        llm = self._llm
        limit = max(1, min(TRIAL_TOKENS, llm.model_config.max_model_len - 2))
        prompt = tokens_input(llm.get_tokenizer().encode(TRIAL_TEXT)[:limit])
        request_id = f"adapter-trial-{trial.lora_int_id}"
        finite = True
        with own_work(self._book):
            tasks = await llm.get_supported_tasks()
            if "generate" in tasks:
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=2,
                    ignore_eos=True,
                    # With the best token of each place: NaN counts as the largest value.
                    logprobs=1,
                    prompt_logprobs=1,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                places: list[Any] = []
                async for result in AsyncLLM.generate(llm, prompt, params, request_id, lora_request=trial):
                    places = [*(result.prompt_logprobs or ()), *(result.outputs[0].logprobs or ())]
                found = [one.logprob for place in places if place for one in place.values()]
                finite = bool(found) and not any(map(math.isnan, found))
            elif (task := llm.model_config.get_pooling_task(tasks)) in POOLING:
                pooling = PoolingParams(task=task)
                pooling.verify(llm.model_config)
                finite = False
                async for result in AsyncLLM.encode(llm, prompt, pooling, request_id, lora_request=trial):
                    finite = bool(torch.isfinite(result.outputs.data).all())
        return finite

    async def _unload(self, request: LoRARequest) -> None:
        """Remove an adapter from vLLM, and delete its files."""
        try:
            async with self._awake():
                await self._llm.remove_lora(request.lora_int_id)
        except Exception:
            # vLLM may still have it, and read its files again: they stay until the engine ends.
            logger.exception("the adapter %s could not be removed from vLLM", request.lora_name)
            return
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)
