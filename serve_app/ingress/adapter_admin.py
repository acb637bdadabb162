"""Routes that load and unload adapters on every replica of a model."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON, Flag, parse_body
from serve_app.api.small_body import small_body
from serve_app.ingress.admin import check_admin
from serve_app.ingress.broadcast import broadcast
from serve_app.ingress.models import ServedModels
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.fields import ServedId
from serve_app.settings.schema import Settings
from serve_app.system import cancellation

logger = logging.getLogger("ray.serve")

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"

BODY_BYTES = 1 << 14
"""Most bytes of a body: a name and a path."""

LOAD_S = 300.0
"""Seconds that the replicas have to fetch an adapter and to load it."""

REFRESH_S = 60.0
"""Seconds that they have to take over what was decided."""

TRIES = 3
"""Calls of all replicas: one of them may stop meanwhile."""


class LoadBody(BaseModel):
    """The body of `LOAD`: vLLM's fields, and ours.

    Attributes:
        lora_name: Id under which the adapter is served.
        lora_path: Its source; see `AdapterSettings`.
        model: Id of the base model; may be left out if one model has adapters.
        pinned: It keeps its slot.
    """

    model_config = ConfigDict(extra="forbid")

    lora_name: ServedId
    lora_path: str = Field(min_length=1)
    model: str | None = None
    pinned: Flag = False


class UnloadBody(BaseModel):
    """The body of `UNLOAD`: vLLM's fields.

    Attributes:
        lora_name: Id of the adapter.
        lora_int_id: vLLM's number; it is ignored, as in vLLM.
    """

    model_config = ConfigDict(extra="forbid")

    lora_name: ServedId
    lora_int_id: int | None = None


class AdapterAdmin:
    """Loads and unloads adapters.

    Args:
        settings: The config's `args`.
        engines: The handle of each model's Engine, by model id.
        running: Returns how many replicas of a model can serve.
        models: The models and their adapters.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Mapping[str, DeploymentHandle[Any]],
        running: Callable[[str], Awaitable[int]],
        models: ServedModels,
    ) -> None:
        self._settings = settings
        self._bases = [model.id for model in settings.models if model.has_adapters]
        self._engines = engines
        self._running = running
        self._models = models

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(LOAD, self._load, methods=["POST"]),
            Route(UNLOAD, self._unload, methods=["POST"]),
        ]

    def _check(self, request: Request) -> None:
        open = self._settings.ingress.open_adapters and "caller" not in request.scope
        if not open:
            check_admin(request)

    async def _load(self, request: Request) -> Response:
        self._check(request)
        body = parse_body(LoadBody, await small_body(request, BODY_BYTES))
        await self._models.refresh(0.0)
        if body.lora_name in self._models:
            message = f"lora_name: {body.lora_name!r} is served already; unload it first, or choose another"
            raise RequestError(400, "invalid_request_error", message, param="lora_name")
        base = self._base(body.model)
        try:
            adapter = AdapterSettings(source=body.lora_path, id=body.lora_name, pinned=body.pinned)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            message = f"lora_path: {reason}"
            raise RequestError(400, "invalid_request_error", message, param="lora_path") from None
        reasons = await self._prepare(base, adapter)
        if not reasons:
            try:
                kept: str = await self._one(base, "keep_adapter", body.lora_name, adapter)
                reasons = [kept] if kept else []
            except RequestError:
                # It is kept, or it is not: the replicas serve it, or drop what was loaded for nothing.
                await self._refresh(base)
                raise
        # Takes over what is kept, and drops what was loaded for nothing.
        replicas = await self._refresh(base)
        if reasons:
            message = f"lora_path: {body.lora_path} {reasons[0]}"
            raise RequestError(400, "invalid_request_error", message, param="lora_path")
        if not all(body.lora_name in served for served in replicas):
            message = "The adapter is kept, and not all replicas have it yet; they go on trying."
            raise RequestError(503, "service_unavailable", message, retry_after_s=5.0)
        return await self._answer("loaded", body.lora_name, base, len(replicas))

    async def _unload(self, request: Request) -> Response:
        self._check(request)
        body = parse_body(UnloadBody, await small_body(request, BODY_BYTES))
        await self._models.refresh(0.0)
        name = body.lora_name
        self._models.find(name)
        if (base := self._models.base_of(name)) == name:
            message = f"lora_name: {name!r} is a model, not an adapter"
            raise RequestError(400, "invalid_request_error", message, param="lora_name")
        kept: str = await self._one(base, "keep_adapter", name, None)
        replicas = [] if kept else await self._refresh(base)
        if any(name in served for served in replicas):
            kept = "is one of the config; remove it there"
        if kept:
            message = f"lora_name: {name!r} {kept}"
            raise RequestError(400, "invalid_request_error", message, param="lora_name")
        return await self._answer("unloaded", name, base, len(replicas))

    async def _answer(self, status: str, id: str, base: str, replicas: int) -> Response:
        await self._models.refresh(0.0)
        return JSONResponse(
            {"object": "adapter", "id": id, "model": base, "status": status, "replicas": replicas}
        )

    def _base(self, name: str | None) -> str:
        """Return the id of the model that gets an adapter."""
        there = ", ".join(self._bases) or "none"
        if name is None and len(self._bases) == 1:
            return self._bases[0]
        if name in self._bases:
            return name
        message = f"model: name the base model of the adapter; models with adapters: {there}"
        raise RequestError(400, "invalid_request_error", message, param="model")

    async def _prepare(self, base: str, adapter: AdapterSettings) -> list[str]:
        """Load an adapter on every replica; return why it can't be, for each that refuses it."""
        if not await self._running(base):
            message = f"{base} has no replica now that could check the adapter. Send it a request first."
            raise RequestError(503, "service_unavailable", message, retry_after_s=5.0)
        try:
            answers = await self._all(base, "prepare_adapter", LOAD_S, adapter.id, adapter)
        except Exception as error:
            # A replica is gone: the others drop the adapter, at the latest when they look at the folder.
            logger.warning("%s: an adapter was not loaded: %r", base, error, exc_info=True)
            await self._refresh(base)
            message = "A replica stopped while it loaded the adapter. Nothing has changed."
            raise RequestError(503, "service_unavailable", message, retry_after_s=5.0) from None
        return [answer for answer in answers if answer]

    async def _refresh(self, base: str) -> list[set[str]]:
        """Let every replica take over what is kept; return the ids that each serves then."""
        for last in range(TRIES - 1, -1, -1):
            try:
                lists: Sequence[Sequence[JSON]] = await self._all(base, "refresh_adapters", REFRESH_S)
                return [{adapter["id"] for adapter in served} for served in lists]
            except Exception as error:
                message = "%s: a replica has not taken over the adapters: %r"
                logger.warning(message, base, error, exc_info=True)
                if not last:
                    message = "Not every replica has answered; they take over the change within seconds."
                    raise RequestError(503, "service_unavailable", message, retry_after_s=5.0) from None
        raise AssertionError

    async def _all(self, base: str, method: str, timeout_s: float, *arguments: Any) -> list[Any]:
        """Call a method of every replica of a model."""
        running = partial(self._running, base)
        return await broadcast(self._engines[base], running, method, *arguments, timeout_s=timeout_s)

    async def _one(self, base: str, method: str, *arguments: Any) -> Any:
        """Call a method of one replica of a model."""
        handle = self._engines[base].options(
            method_name=method, _by_reference=False, request_serialization="pickle"
        )
        try:
            async with asyncio.timeout(REFRESH_S):
                return await handle.remote(*arguments)
        except (Exception, asyncio.CancelledError) as error:
            if cancellation.is_own():
                raise
            logger.warning("%s: the adapters were not changed: %r", base, error, exc_info=True)
            message = "A replica stopped while it changed the adapters. Try again."
            raise RequestError(503, "service_unavailable", message, retry_after_s=5.0) from None
