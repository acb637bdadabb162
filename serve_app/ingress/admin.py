"""Routes for administrators: the API keys, reports on the usage ledger, and adapters.

A report is made by the command `saturate usage` in a process of its own: it may read gigabytes, and in this
process it would hold up streams.
"""

import asyncio
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON, parse_body
from serve_app.auth.key_store import KeyStore
from serve_app.ingress.body import small_body
from serve_app.ingress.context import context_of
from serve_app.ingress.models import ServedModels
from serve_app.ingress.status import broadcast
from serve_app.settings.adapters import AdapterSettings
from serve_app.settings.fields import ServedId
from serve_app.settings.schema import Settings
from serve_app.system import cancellation
from serve_app.system.cpu_scheduling import use_usual_priority

logger = logging.getLogger("ray.serve")

KEYS = "/v1/admin/keys"
USAGE = "/v1/admin/usage"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"

BODY_BYTES = 1 << 14
"""Maximum bytes of a body: a name and a path."""

LOAD_S = 300.0
"""Seconds that the replicas have to fetch an adapter and to load it."""

REFRESH_S = 60.0
"""Seconds that replicas have to take over a change."""

TRIES = 3
"""Calls of all replicas: one of them may stop meanwhile."""

COMMAND = (sys.executable, "-m", "serve_app.cli", "usage")

FIELDS = ("by", "since", "until", "format")
"""Parameters of a report, which are options of the command."""

OPTION = re.compile(rf"--({'|'.join(FIELDS)})\b")

TYPES = {"json": "application/json", "csv": "text/csv; charset=utf-8"}

WAIT_S = 60.0
"""Seconds that a report may take, with the reports before it."""

USAGE_ERROR = 2
"""Exit status of a command with a wrong option."""


class LoadBody(BaseModel):
    """The body of `LOAD`: vLLM's fields, and ours.

    Attributes:
        lora_name: Id under which the adapter is served.
        lora_path: Its source; see `AdapterSettings`.
        model: Id of the base model; may be left out if one model has adapters.
    """

    model_config = ConfigDict(extra="forbid")

    lora_name: ServedId
    lora_path: str = Field(min_length=1)
    model: str | None = None


class UnloadBody(BaseModel):
    """The body of `UNLOAD`: vLLM's fields.

    Attributes:
        lora_name: Id of the adapter.
        lora_int_id: vLLM's number; it is ignored, as in vLLM.
    """

    model_config = ConfigDict(extra="forbid")

    lora_name: ServedId
    lora_int_id: int | None = None


class Admin:
    """The routes for administrators: for requests with a key that has `admin`.

    Args:
        settings: The config's `args`.
        keys: The keys of the service; None: it asks for none, and has no administrator.
        engines: The handle of each model's Engine, by model id.
        running: Returns how many replicas of a model can serve.
        models: The models and their adapters.
    """

    def __init__(
        self,
        settings: Settings,
        keys: KeyStore | None,
        engines: Mapping[str, DeploymentHandle[Any]],
        running: Callable[[str], Awaitable[int]],
        models: ServedModels,
    ) -> None:
        self._keys = keys
        self._reports = UsageReports(settings.usage.ledger.folder if settings.usage.ledger else None)
        self._open_adapters = settings.ingress.open_adapters
        self._bases = [model.id for model in settings.models if model.has_adapters]
        self._engines = engines
        self._running = running
        self._models = models

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(LOAD, self._load, methods=["POST"]),
            Route(UNLOAD, self._unload, methods=["POST"]),
            Route(KEYS, self._list_keys),
            Route(USAGE, self._report_usage),
        ]

    async def _list_keys(self, request: Request) -> Response:
        check_admin(request)
        assert self._keys
        return JSONResponse({"object": "list", "data": self._keys.describe(), "has_more": False})

    async def _report_usage(self, request: Request) -> Response:
        check_admin(request)
        text, media_type = await self._reports.make(request.query_params)
        return Response(text, media_type=media_type)

    def _check(self, request: Request) -> None:
        if not (self._open_adapters and context_of(request.scope).caller is None):
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
            adapter = AdapterSettings(source=body.lora_path, id=body.lora_name)
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
            kept = "belongs to the config; remove it there"
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
        """Let every replica take over the stored adapters; return the ids that each replica serves then."""
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


def check_admin(request: Request) -> None:
    """Raise a RequestError if a request does not come from an administrator: 403.

    A service without keys has no administrator, so its clients get a 403 too.
    """
    caller = context_of(request.scope).caller
    if caller is None:
        message = "This service asks for no API keys, so it has no administrator; see `args.access`."
        raise RequestError(403, "permission_error", message)
    if not caller.key.admin:
        message = "This API key is not an administrator's, with `admin: true`."
        raise RequestError(403, "permission_error", message)


class UsageReports:
    """Reports on a ledger, one at a time.

    Args:
        folder: Folder or URL of the ledger; None: the service keeps none.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._one = asyncio.Lock()

    async def make(self, fields: Mapping[str, str]) -> tuple[bytes, str]:
        """Return a report and its media type.

        Args:
            fields: Parameters, as the client wrote them.

        Raises:
            RequestError: 404, there is no ledger; 400, a parameter is wrong; 503, the ledger can't be read.
        """
        if self._folder is None:
            message = "This service keeps no usage ledger: its config has no `args.usage.ledger`"
            raise RequestError(404, "not_found_error", message)
        for name, value in fields.items():
            if name not in FIELDS:
                message = f"{name}: unknown parameter; known are {', '.join(FIELDS)}"
                raise RequestError(400, "invalid_request_error", message, param=name)
            if "\0" in value:
                # No argument of a command may have one.
                message = f"{name}: must not have a NUL"
                raise RequestError(400, "invalid_request_error", message, param=name)
        form = fields.get("format", "json")
        if form not in TYPES:
            message = f"format: {form!r} is not a format of a report; take {' or '.join(TYPES)}"
            raise RequestError(400, "invalid_request_error", message, param="format")
        # One argument for an option and its value: no value is taken for an option.
        options = [f"--{name}={value}" for name, value in (dict(fields) | {"format": form}).items()]
        try:
            async with asyncio.timeout(WAIT_S), self._one:
                text = await _run([*options, "--", self._folder])
        except TimeoutError:
            message = f"The report took over {WAIT_S:g} s; ask for a shorter time, or run `saturate usage`"
            raise RequestError(503, "service_unavailable", message, retry_after_s=WAIT_S) from None
        return text, TYPES[form]


async def _run(arguments: list[str]) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    use_usual_priority(process.pid)
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == 0:
        return output
    # The error may have more lines behind its first one.
    lines = ["error: saturate usage failed", *errors.decode(errors="replace").splitlines()]
    line = next(line for line in reversed(lines) if line.startswith("error: "))
    # Of "error: --by: 'x' is no column (see `... --help`)" the middle is for clients.
    message = OPTION.sub(r"\1", line.removeprefix("error: ").partition(" (see `")[0])
    # A folder that is missing is no option, and no mistake of the client.
    if process.returncode == USAGE_ERROR and (option := OPTION.search(line)):
        raise RequestError(400, "invalid_request_error", message, param=option[1])
    raise RequestError(503, "service_unavailable", message)
