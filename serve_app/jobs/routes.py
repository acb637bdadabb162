"""Routes of `/v1/files` and `/v1/batches`."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Annotated, Literal, ParamSpec, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.errors import EXCEPTION_HANDLERS, RequestError, error_response, path_of
from serve_app.api.protocol import JSON, parse_body
from serve_app.api.scheduling import Scheduling, SchedulingFields, scheduling_of
from serve_app.ingress.body import small_body
from serve_app.jobs.content import Contents
from serve_app.jobs.errors import ContentLostError, InUseError, NotFoundError, StateError, TooManyError
from serve_app.jobs.intake import ENDPOINTS, FileUpload, PendingUploads, bad_request, read_rows, receive
from serve_app.jobs.models import (
    MAX_WINDOW_S,
    MIN_WINDOW_S,
    Batch,
    File,
    batch_object,
    file_object,
    list_object,
)
from serve_app.jobs.storage import add_file, delete_contents
from serve_app.jobs.store import Store
from serve_app.rows.pacing import Clock
from serve_app.settings.batches import DAY_S, BatchesSettings
from serve_app.system.database import FencedError

logger = logging.getLogger("ray.serve")

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
"""Calls of the store and of the contents at once."""

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * DAY_S
"""Bounds of `expires_after`: the seconds after which a file is deleted."""

BODY_BYTES = 1 << 16
"""Most bytes of the body that creates a batch."""

MAX_FILES_PAGE, MAX_BATCHES_PAGE = 10_000, 100

NUMBER = re.compile(r"[0-9]{1,9}")
WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")

Limits = Callable[[str], BatchesSettings]
"""Returns the limits on the files and batches of an API key, by its name."""


class ExpiresAfter(BaseModel):
    """Time after which a file is deleted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(strict=True, ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


def request_scheduling(request: Request) -> Scheduling:
    """Return the scheduling of a request, as for every other route."""
    headers = request.scope["headers"]
    if (caller := request.scope.get("caller")) is not None:
        scheduling: Scheduling = caller.scheduling(headers, SchedulingFields())
        return scheduling
    return scheduling_of(headers, SchedulingFields())


class BatchAPI:
    """The routes of files and batches.

    Args:
        store: The state.
        content: The contents.
        notice: Called when a batch was added or cancelled.
        limits: Returns the limits of an API key.
        rights: Returns the rights of the batches that an API key creates, by its name; see `KeyRules.rights`.
        scheduling: Returns the tenant and weight of a request; a tenant sees only its own files and batches.
        warnings: Returns messages about batches, by id.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        content: Contents,
        notice: Callable[[], None],
        *,
        limits: Limits,
        rights: Callable[[str], JSON] = lambda key: {},
        scheduling: Callable[[Request], Scheduling] = request_scheduling,
        warnings: Callable[[], Mapping[str, str]] = dict,
        clock: Clock = time.time,
    ) -> None:
        self._store = store
        self._content = content
        self._notice = notice
        self._limits = limits
        self._rights = rights
        self._scheduling = scheduling
        self._warnings = warnings
        self._clock = clock
        self._pending = PendingUploads()
        self._reading = asyncio.Lock()
        # A separate pool: the loop's threads may be busy with the input and the end of large batches.
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="batches-api")

    def app(self) -> Starlette:
        """Return the application of the routes."""
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/v1/files", self._create_file),
            ("GET", "/v1/files", self._list_files),
            ("GET", "/v1/files/{id}", self._retrieve_file),
            ("GET", "/v1/files/{id}/content", self._read_file),
            ("DELETE", "/v1/files/{id}", self._delete_file),
            ("POST", "/v1/batches", self._create_batch),
            ("GET", "/v1/batches", self._list_batches),
            ("GET", "/v1/batches/{id}", self._retrieve_batch),
            ("POST", "/v1/batches/{id}/cancel", self._cancel_batch),
        ]
        return Starlette(
            routes=[Route(path, call, methods=[method]) for method, path, call in routes],
            exception_handlers=EXCEPTION_HANDLERS | {OSError: _fail, FencedError: _fail},
        )

    # Files

    async def _create_file(self, request: Request) -> Response:
        scheduling = self._scheduling(request)
        limits = self._limits(scheduling.key)
        # An unreachable database is reported before the file is received.
        await self._run(self._store.files, scheduling.tenant, limit=1)
        with self._pending.count(scheduling.tenant, limits.max_tenant_bytes) as grow:
            upload = await receive(request, self._content, limits.max_file_bytes, grow)
            try:
                file = self._checked(upload, scheduling.tenant, limits.retention_s)
                await self._keep(upload, file, limits)
            except BaseException:
                upload.discard()
                raise
        return JSONResponse(file_object(file))

    def _checked(self, upload: FileUpload, tenant: str, seconds: int) -> File:
        if upload.draft is None:
            raise bad_request("file: required, but missing", "file")
        purpose = upload.fields.get("purpose")
        if purpose != "batch":
            raise bad_request('purpose: must be "batch", the only supported purpose', "purpose")
        now = int(self._clock())
        text = upload.fields.get("expires_after[seconds]")
        anchor = upload.fields.get("expires_after[anchor]")
        if text is not None or anchor is not None:
            if anchor != "created_at":
                raise bad_request('expires_after[anchor]: must be "created_at"', "expires_after[anchor]")
            seconds = int(text) if text and NUMBER.fullmatch(text) else 0
            if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
                message = f"expires_after[seconds]: must be a number from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
                raise bad_request(message, "expires_after[seconds]")
        return File(
            id=_new_file_id(),
            tenant=tenant,
            filename=upload.filename[:255],
            purpose=purpose,
            bytes=upload.draft.size,
            created_at=now,
            expires_at=now + seconds,
        )

    async def _keep(self, upload: FileUpload, file: File, limits: BatchesSettings) -> None:
        draft = upload.draft
        assert draft is not None
        # One upload at a time: the parse keeps a core busy.
        async with self._reading:
            with draft.open() as text:
                plan = await asyncio.to_thread(read_rows, text, limits)
        try:
            await self._run(add_file, self._store, self._content, draft, file, plan, limits)
        except TooManyError as error:
            raise bad_request(f"{error}; delete files first", "file") from None

    async def _list_files(self, request: Request) -> Response:
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request('order: must be "asc" or "desc"', "order")
        after = query.get("after")
        try:
            page = await self._run(
                self._store.files,
                self._tenant(request),
                after=after,
                limit=_page_limit(request, MAX_FILES_PAGE, MAX_FILES_PAGE),
                order="asc" if order == "asc" else "desc",
                purpose=query.get("purpose"),
            )
        except NotFoundError:
            raise bad_request(f"after: there is no file {after!r}", "after") from None
        return JSONResponse(list_object(page, file_object))

    async def _retrieve_file(self, request: Request) -> Response:
        return JSONResponse(file_object(await self._file(request)))

    async def _read_file(self, request: Request) -> Response:
        file = await self._file(request)
        kind = "application/octet-stream"
        size = await self._run(self._content.size, file.id)
        path = self._content.path(file.id)
        if size == file.bytes and path is not None:
            return _StoredFile(path, media_type=kind)
        pieces = self._content.pieces(file.id, file.bytes)
        try:
            # Lost content is reported before the answer begins.
            first = await self._run(next, pieces, b"") if size in (None, file.bytes) else b""
        except (ContentLostError, FileNotFoundError):
            first = b""
        if file.bytes and not first:
            message = f"The content of the file {file.id!r} is lost: the storage doesn't have it whole"
            raise RequestError(500, "internal_error", message)
        whole = chain([first], pieces)
        return StreamingResponse(whole, media_type=kind, headers={"content-length": str(file.bytes)})

    async def _delete_file(self, request: Request) -> Response:
        id = request.path_params["id"]
        try:
            await self._run(self._store.remove_file, self._tenant(request), id)
        except NotFoundError:
            raise _no("file", id) from None
        except InUseError:
            message = f"The file {id!r} belongs to a batch that has not ended; cancel the batch first"
            raise _conflict(message) from None
        await self._run(self._delete_contents, [id])
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> File:
        id = request.path_params["id"]
        try:
            return await self._run(self._store.file, self._tenant(request), id)
        except NotFoundError:
            raise _no("file", id) from None

    # Batches

    async def _create_batch(self, request: Request) -> Response:
        scheduling = self._scheduling(request)
        limits = self._limits(scheduling.key)
        body = parse_body(BatchRequest, await small_body(request, BODY_BYTES))
        if body.endpoint not in ENDPOINTS:
            raise bad_request(f"endpoint: must be one of {', '.join(ENDPOINTS)}", "endpoint")
        window_s = _window_s(body.completion_window)
        now = int(self._clock())
        retention_s = limits.retention_s
        if body.output_expires_after is not None:
            retention_s = body.output_expires_after.seconds
        batch = Batch(
            id=f"batch_{uuid4().hex}",
            tenant=scheduling.tenant,
            weight=scheduling.weight,
            api_key=scheduling.key,
            rights=self._rights(scheduling.key),
            endpoint=body.endpoint,
            input_file=body.input_file_id,
            output_file=_new_file_id(),
            error_file=_new_file_id(),
            completion_window=body.completion_window,
            metadata=dict(body.metadata or {}),
            retention_s=retention_s,
            created_at=now,
            expires_at=now + window_s,
        )
        try:
            file = await self._run(self._store.file, batch.tenant, batch.input_file)
            if file.purpose != "batch":
                message = f'input_file_id: the purpose of {file.id!r} is not "batch"'
                raise bad_request(message, "input_file_id")
            forgotten = await self._run(
                self._store.add_batch, batch, limits.max_open_batches, limits.max_batches
            )
        except NotFoundError:
            message = f"input_file_id: there is no file {body.input_file_id!r}"
            raise bad_request(message, "input_file_id") from None
        except TooManyError as error:
            # Not 429: another try helps only after a batch has ended, which may take a day.
            raise bad_request(f"{error}; wait until a batch has ended, or cancel a batch") from None
        await self._run(self._delete_contents, forgotten)
        self._notice()
        return JSONResponse(batch_object(batch))

    async def _list_batches(self, request: Request) -> Response:
        after = request.query_params.get("after")
        limit = _page_limit(request, 20, MAX_BATCHES_PAGE)
        try:
            page = await self._run(self._store.batches, self._tenant(request), after=after, limit=limit)
        except NotFoundError:
            raise bad_request(f"after: there is no batch {after!r}", "after") from None
        return JSONResponse(list_object(page, self._as_json))

    async def _retrieve_batch(self, request: Request) -> Response:
        return JSONResponse(self._as_json(await self._batch(request)))

    async def _cancel_batch(self, request: Request) -> Response:
        batch = await self._batch(request)
        if batch.state != "cancelling":
            try:
                batch = await self._run(self._store.move, batch.id, "cancelling", int(self._clock()))
            except (StateError, NotFoundError):
                state = (await self._batch(request)).state
                raise _conflict(f"A batch that is {state} can't be cancelled") from None
            self._notice()
        return JSONResponse(self._as_json(batch))

    def _as_json(self, batch: Batch) -> JSON:
        return batch_object(batch, self._warnings().get(batch.id))

    async def _batch(self, request: Request) -> Batch:
        id = request.path_params["id"]
        try:
            return await self._run(self._store.batch, id, self._tenant(request))
        except NotFoundError:
            raise _no("batch", id) from None

    # Both

    def _tenant(self, request: Request) -> str:
        return self._scheduling(request).tenant

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads of the routes."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _delete_contents(self, ids: list[str]) -> None:
        """Delete contents whose files are deleted already; errors are logged and not sent to the client."""
        try:
            delete_contents(self._store, self._content, ids)
        except (OSError, FencedError) as error:
            logger.error("contents can't be deleted before the next start: %s", error)


class _StoredFile(FileResponse):
    """A file response; errors about ranges, which Starlette sends as plain text, get the API's shape."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        start: Message = {}

        async def in_shape(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start:
                text = message.get("body", b"").decode(errors="replace")
                error = RequestError(
                    start["status"], "invalid_request_error", f"range: {text}", param="range"
                )
                response = error_response(error, path_of(scope))
                if ranges := Headers(raw=start["headers"]).get("content-range"):
                    response.headers["content-range"] = ranges
                await response(scope, receive, send)
            else:
                await send(message)

        await super().__call__(scope, receive, in_shape)


async def _fail(request: Request, error: Exception) -> Response:
    """Answer a request during which the disk or the database failed."""
    logger.error("%s %s: %s", request.method, request.url.path, error)
    message = "The service's disk or database fails. Try again later."
    if isinstance(error, FencedError):
        message = "Another replica of the service has taken over the batches. Try again."
    return error_response(RequestError(503, "service_unavailable", message), request.url.path)


def _page_limit(request: Request, usual: int, most: int) -> int:
    """Return the query parameter `limit`: a number from 1 to `most`; `usual` if it is missing."""
    text = request.query_params.get("limit", str(usual))
    limit = int(text) if NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= most:
        raise bad_request(f"limit: must be a number from 1 to {most}", "limit")
    return limit


def _window_s(text: str) -> int:
    found = WINDOW.fullmatch(text)
    seconds = int(found[1]) * (3600 if found[2] == "h" else DAY_S) if found else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        message = (
            'completion_window: must be a number of hours or days, such as "24h" or "7d", '
            f"from {MIN_WINDOW_S // 3600}h to {MAX_WINDOW_S // DAY_S}d"
        )
        raise bad_request(message, "completion_window")
    return seconds


def _new_file_id() -> str:
    return f"file-{uuid4().hex}"


def _no(what: str, id: str) -> RequestError:
    """Return the error for a file or a batch that the tenant doesn't have."""
    return RequestError(404, "not_found_error", f"There is no {what} {id!r}", param="id")


def _conflict(message: str) -> RequestError:
    """Return the error for a change that the state of a file or batch doesn't allow."""
    # Otherwise OpenAI's clients would send the request again.
    return RequestError(409, "invalid_request_error", message, param="id", final=True)
