"""Routes of `/v1/files` and `/v1/batches`."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, ParamSpec, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response, path_of
from serve_app.api.protocol import JSON, parse_body
from serve_app.api.scheduling import Scheduling, SchedulingFields, scheduling_of
from serve_app.ingress.body import small_body
from serve_app.jobs.content import Contents
from serve_app.jobs.errors import (
    ContentLostError,
    DatabaseError,
    FencedError,
    InUseError,
    NotFoundError,
    StateError,
    TooManyError,
)
from serve_app.jobs.forecast import REFUSED, Outlook
from serve_app.jobs.intake import ENDPOINTS, PendingUploads, Upload, receive
from serve_app.jobs.limits import DAY_S, MAX_EXPIRY_S, MIN_EXPIRY_S, Limits
from serve_app.jobs.models import ENDED, Batch, File, batch_object, file_object, list_object
from serve_app.jobs.pacing import Clock
from serve_app.jobs.storage import add_file, delete_contents, whole
from serve_app.jobs.store import Store

LOOK_S = 0.5
"""Seconds between two looks for more."""

Look = Callable[[], Awaitable[Batch]]


def written(batch: Batch, errors: bool) -> tuple[str, int]:
    """Return the id of the output or the error file of a batch, and its committed bytes."""
    return (batch.error_file, batch.error_bytes) if errors else (batch.output_file, batch.output_bytes)


async def result_stream(
    content: Contents, batch: Batch, look: Look, errors: bool, start: int = 0, look_s: float = LOOK_S
) -> AsyncIterator[bytes]:
    """Yield the output or the error file of a batch up to its end, as far as it is committed.

    Args:
        content: The contents.
        batch: The batch.
        look: Returns the batch as it is now.
        errors: The error file instead of the output.
        start: Bytes to leave out, which the reader has already.
        look_s: Seconds between two looks for more.

    Raises:
        ContentLostError: The file is gone.
    """
    lost = False
    while True:
        id, size = written(batch, errors)
        try:
            pieces: Iterator[bytes] = content.pieces(id, size, start) if start < size else iter(())
            while (piece := await asyncio.to_thread(next, pieces, b"")) != b"":
                start += len(piece)
                yield piece
            lost = False
        except (ContentLostError, FileNotFoundError):
            # In object storage, the end of a batch replaces the parts of a file by one object.
            if lost:
                raise
            lost = True
            continue
        if batch.state in ENDED:
            return
        await asyncio.sleep(look_s)
        batch = await look()


logger = logging.getLogger("ray.serve")

Handler = Callable[[Request], Awaitable[Response]]
P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
"""Calls of the store and of the contents at once."""

NUMBER = re.compile(r"[0-9]{1,9}")


def _threads() -> ThreadPoolExecutor:
    # Threads of their own: those of the loop may be busy with the input and the end of large batches.
    return ThreadPoolExecutor(THREADS, thread_name_prefix="batches-api")


@dataclass(frozen=True, slots=True)
class RouteContext:
    """State, contents and callers, as the routes use them.

    Attributes:
        store: The state.
        content: The contents.
        limits: Returns the limits on the files and batches of an API key, by its name.
        rights: Returns the rights of the batches that an API key creates, by its name.
        scheduling: Returns the tenant of a request, who sees its own files and batches only, and its weight.
        clock: Seconds since the epoch.
    """

    store: Store
    content: Contents
    limits: Callable[[str], Limits]
    rights: Callable[[str], JSON]
    scheduling: Callable[[Request], Scheduling]
    clock: Clock
    _pool: ThreadPoolExecutor = field(init=False, default_factory=_threads)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads of the routes."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def tenant(self, request: Request) -> str:
        """Return the tenant of a request."""
        return self.scheduling(request).tenant

    def delete(self, ids: list[str]) -> None:
        """Delete contents whose files are deleted already, so that no error is the client's."""
        try:
            delete_contents(self.store, self.content, ids)
        except (OSError, DatabaseError, FencedError) as error:
            logger.error("contents can't be deleted before the next start: %s", error)


def route(method: str, path: str, handler: Handler) -> Route:
    """Return a route whose errors are answers."""

    async def answer(request: Request) -> Response:
        try:
            if any("\0" in text for text in (*request.path_params.values(), *request.query_params.values())):
                # PostgreSQL refuses it, which would look like a database that fails.
                raise bad_request("The path and the query must not have a NUL")
            return await handler(request)
        except RequestError as error:
            failed = error
        except (OSError, DatabaseError) as error:
            logger.error("%s %s: %s", request.method, request.url.path, error)
            message = "The service's disk or database fails. Try again later."
            failed = RequestError(503, "service_unavailable", message)
        except FencedError as error:
            logger.error("%s %s: %s", request.method, request.url.path, error)
            message = "Another replica of the service has taken over the batches. Try again."
            failed = RequestError(503, "service_unavailable", message)
        return error_response(failed, request.url.path)

    return Route(path, answer, methods=[method])


def page_limit(request: Request, usual: int, most: int) -> int:
    """Return the query parameter `limit`: a number from 1 to `most`; `usual` where it is missing."""
    text = request.query_params.get("limit", str(usual))
    limit = int(text) if NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= most:
        raise bad_request(f"limit: must be a number from 1 to {most}", "limit")
    return limit


def new_file_id() -> str:
    """Return the id of a new file."""
    return f"file-{uuid4().hex}"


def no_file(id: str) -> RequestError:
    """Return the error for a file that the tenant hasn't."""
    return RequestError(404, "not_found_error", f"There is no file {id!r}", param="id")


def conflict(message: str) -> RequestError:
    """Return the error for a change that the state of a file or batch doesn't allow."""
    # OpenAI's clients would send it again otherwise.
    return RequestError(409, "invalid_request_error", message, param="id", final=True)


def bad_request(message: str, param: str | None = None) -> RequestError:
    """Return the error for a wrong field."""
    return RequestError(400, "invalid_request_error", message, param=param)


MAX_FILES_PAGE = 10_000


class FileRoutes:
    """The routes of files.

    Args:
        context: State, contents and callers.
    """

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._pending = PendingUploads()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            route("POST", "/v1/files", self._create),
            route("GET", "/v1/files", self._list),
            route("GET", "/v1/files/{id}", self._retrieve),
            route("GET", "/v1/files/{id}/content", self._read),
            route("DELETE", "/v1/files/{id}", self._delete),
        ]

    async def _create(self, request: Request) -> Response:
        scheduling = self._context.scheduling(request)
        limits = self._context.limits(scheduling.key)
        # A database that is gone is told before the file is received.
        await self._context.run(self._context.store.files, scheduling.tenant, limit=1)
        with self._pending.count(scheduling.tenant, limits.max_tenant_bytes) as grow:
            upload = await receive(request, self._context.content, limits.max_file_bytes, grow)
            try:
                file = self._checked(upload, scheduling.tenant, limits.retention_s)
                await self._context.run(self._keep, upload, file, limits)
            except BaseException:
                upload.discard()
                raise
        return JSONResponse(file_object(file))

    def _checked(self, upload: Upload, tenant: str, seconds: int) -> File:
        if upload.draft is None:
            raise bad_request("file: required, but missing", "file")
        purpose = upload.fields.get("purpose")
        if purpose != "batch":
            raise bad_request('purpose: must be "batch", the only one that is supported', "purpose")
        now = int(self._context.clock())
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
            id=new_file_id(),
            tenant=tenant,
            filename=upload.filename[:255],
            purpose=purpose,
            bytes=upload.draft.size,
            created_at=now,
            expires_at=now + seconds,
        )

    def _keep(self, upload: Upload, file: File, limits: Limits) -> None:
        if upload.draft is not None:
            try:
                add_file(self._context.store, self._context.content, upload.draft, file, limits)
            except TooManyError as error:
                raise bad_request(f"{error}; delete some first", "file") from None

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request('order: must be "asc" or "desc"', "order")
        after = query.get("after")
        try:
            page = await self._context.run(
                self._context.store.files,
                self._context.tenant(request),
                after=after,
                limit=page_limit(request, MAX_FILES_PAGE, MAX_FILES_PAGE),
                order="asc" if order == "asc" else "desc",
                purpose=query.get("purpose"),
            )
        except NotFoundError:
            raise bad_request(f"after: there is no file {after!r}", "after") from None
        return JSONResponse(list_object(page, file_object))

    async def _retrieve(self, request: Request) -> Response:
        return JSONResponse(file_object(await self._find(request)))

    async def _read(self, request: Request) -> Response:
        file = await self._find(request)
        path = self._context.content.path(file.id)
        if not await self._context.run(whole, self._context.content, file):
            message = f"The content of the file {file.id!r} got lost on the server's disk"
            raise RequestError(500, "internal_error", message)
        kind = "application/octet-stream"
        if isinstance(path, Path):
            return _StoredFile(path, media_type=kind)
        pieces = self._context.content.pieces(file.id, file.bytes)
        return StreamingResponse(pieces, media_type=kind, headers={"content-length": str(file.bytes)})

    async def _delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        try:
            await self._context.run(self._context.store.remove_file, self._context.tenant(request), id)
        except NotFoundError:
            raise no_file(id) from None
        except InUseError:
            message = f"The file {id!r} is the input of a batch that has not ended; cancel that first"
            raise conflict(message) from None
        await self._context.run(self._context.delete, [id])
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> File:
        id = request.path_params["id"]
        try:
            return await self._context.run(self._context.store.file, self._context.tenant(request), id)
        except NotFoundError:
            raise no_file(id) from None


class _StoredFile(FileResponse):
    """A file; an error about its ranges, of which Starlette's are plain text, has the shape of others."""

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


BODY_BYTES = 1 << 16
"""Most bytes of the body that creates a batch."""

MAX_BATCHES_PAGE = 100

WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
OFFSET = re.compile(r"[0-9]{1,15}")


Foresee = Callable[[Batch, int], tuple[Batch, Outlook]]
"""Returns a new batch with what is known of it, and its outlook, by the bytes of its input."""


class ExpiresAfter(BaseModel):
    """Time after which a file is deleted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(strict=True, ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_file_id: Annotated[str, Field(pattern=r"^[^\x00]*$")]
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


class BatchRoutes:
    """The routes of batches.

    Args:
        context: State, contents and callers.
        notice: Called when a batch was added or cancelled.
        warnings: Returns messages about batches, by id.
        foresee: Returns a new batch with what is known of it, and its outlook, in any thread.
        refuse: Whether a batch is refused whose window surely doesn't hold.
    """

    def __init__(
        self,
        context: RouteContext,
        notice: Callable[[], None],
        warnings: Callable[[], Mapping[str, str]],
        foresee: Foresee,
        refuse: bool,
    ) -> None:
        self._context = context
        self._notice = notice
        self._warnings = warnings
        self._foresee = foresee
        self._refuse = refuse
        # One at a time: a promise counts for the next one.
        self._promising = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            route("POST", "/v1/batches", self._create),
            route("GET", "/v1/batches", self._list),
            route("GET", "/v1/batches/{id}", self._retrieve),
            route("GET", "/v1/batches/{id}/output", partial(self._results, errors=False)),
            route("GET", "/v1/batches/{id}/errors", partial(self._results, errors=True)),
            route("POST", "/v1/batches/{id}/cancel", self._cancel),
        ]

    async def _create(self, request: Request) -> Response:
        scheduling = self._context.scheduling(request)
        limits = self._context.limits(scheduling.key)
        body = parse_body(BatchRequest, await small_body(request, BODY_BYTES))
        if body.endpoint not in ENDPOINTS:
            raise bad_request(f"endpoint: must be one of {', '.join(ENDPOINTS)}", "endpoint")
        window_s = _window_s(body.completion_window, limits)
        now = int(self._context.clock())
        retention_s = limits.retention_s
        if body.output_expires_after is not None:
            retention_s = body.output_expires_after.seconds
        batch = Batch(
            id=f"batch_{uuid4().hex}",
            tenant=scheduling.tenant,
            weight=scheduling.weight,
            api_key=scheduling.key,
            rights=self._context.rights(scheduling.key),
            endpoint=body.endpoint,
            input_file=body.input_file_id,
            output_file=new_file_id(),
            error_file=new_file_id(),
            completion_window=body.completion_window,
            metadata=dict(body.metadata or {}),
            retention_s=retention_s,
            created_at=now,
            expires_at=now + window_s,
        )
        try:
            file = await self._context.run(self._context.store.file, batch.tenant, batch.input_file)
            if file.purpose != "batch":
                message = f'input_file_id: the purpose of {file.id!r} is not "batch"'
                raise bad_request(message, "input_file_id")
            async with self._promising:
                batch, outlook = await self._context.run(self._foresee, batch, file.bytes)
                if self._refuse and outlook.verdict in REFUSED:
                    raise bad_request(f"completion_window: {outlook.message}", "completion_window")
                await self._context.run(self._add, batch, limits)
        except NotFoundError:
            message = f"input_file_id: there is no file {body.input_file_id!r}"
            raise bad_request(message, "input_file_id") from None
        except TooManyError as error:
            # Not 429: another try helps when a batch has ended, which may take a day.
            raise bad_request(f"{error}; wait until one has ended, or cancel one") from None
        self._notice()
        return JSONResponse(batch_object(batch, outlook.message))

    def _add(self, batch: Batch, limits: Limits) -> None:
        self._context.delete(
            self._context.store.add_batch(batch, limits.max_open_batches, limits.max_batches)
        )

    async def _list(self, request: Request) -> Response:
        after = request.query_params.get("after")
        limit = page_limit(request, 20, MAX_BATCHES_PAGE)
        try:
            page = await self._context.run(
                self._context.store.batches, self._context.tenant(request), after=after, limit=limit
            )
        except NotFoundError:
            raise bad_request(f"after: there is no batch {after!r}", "after") from None
        return JSONResponse(list_object(page, self._as_json))

    async def _retrieve(self, request: Request) -> Response:
        return JSONResponse(self._as_json(await self._find(request)))

    async def _results(self, request: Request, errors: bool) -> Response:
        batch = await self._find(request)
        id, size = written(batch, errors)
        offset = request.query_params.get("offset", "0")
        if not OFFSET.fullmatch(offset) or int(offset) > size:
            raise bad_request(f"offset: must be a number from 0 to the {size} bytes that there are", "offset")
        if batch.state in ENDED and size and await self._context.run(self._context.content.size, id) != size:
            raise no_file(id)
        pieces = result_stream(
            self._context.content,
            batch,
            partial(self._context.run, self._context.store.batch, batch.id),
            errors,
            int(offset),
        )
        return StreamingResponse(pieces, media_type="application/jsonl")

    async def _cancel(self, request: Request) -> Response:
        batch = await self._find(request)
        if batch.state != "cancelling":
            now = int(self._context.clock())
            try:
                batch = await self._context.run(self._context.store.move, batch.id, "cancelling", now)
            except (StateError, NotFoundError):
                state = (await self._find(request)).state
                message = f"A batch that is {state} can't be cancelled"
                raise conflict(message) from None
            self._notice()
        return JSONResponse(self._as_json(batch))

    def _as_json(self, batch: Batch) -> JSON:
        return batch_object(batch, self._warnings().get(batch.id))

    async def _find(self, request: Request) -> Batch:
        id = request.path_params["id"]
        try:
            return await self._context.run(self._context.store.batch, id, self._context.tenant(request))
        except NotFoundError:
            message = f"There is no batch {id!r}"
            raise RequestError(404, "not_found_error", message, param="id") from None


def _window_s(text: str, limits: Limits) -> int:
    found = WINDOW.fullmatch(text)
    seconds = int(found[1]) * (3600 if found[2] == "h" else DAY_S) if found else 0
    least, most = limits.min_window_s, limits.max_window_s
    if not least <= seconds <= most:
        message = (
            'completion_window: must be a number of hours or days, such as "24h" or "7d", '
            f"from {least // 3600}h to {most // DAY_S}d"
        )
        raise bad_request(message, "completion_window")
    return seconds


def request_scheduling(request: Request) -> Scheduling:
    """Return the scheduling of a request, as for every other route."""
    headers = request.scope["headers"]
    if (caller := request.scope.get("caller")) is not None:
        scheduling: Scheduling = caller.scheduling(headers, SchedulingFields())
        return scheduling
    return scheduling_of(headers, SchedulingFields())


class BatchAPI:
    """The routes.

    Args:
        store: The state.
        content: The contents.
        notice: Called when a batch was added or cancelled.
        limits: Returns the limits on the files and batches of an API key, by its name.
        rights: Returns the rights of the batches that an API key creates, by its name; see `KeyRules.rights`.
        scheduling: Returns the tenant of a request, who sees its own files and batches only, and its weight.
        warnings: Returns messages about batches, by id.
        foresee: Returns a new batch with what is known of it, and its outlook; see `Runner.foresee`.
        refuse: Whether a batch is refused whose window surely doesn't hold.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        content: Contents,
        notice: Callable[[], None],
        *,
        limits: Callable[[str], Limits] = lambda key: Limits(),
        rights: Callable[[str], JSON] = lambda key: {},
        scheduling: Callable[[Request], Scheduling] = request_scheduling,
        warnings: Callable[[], Mapping[str, str]] = dict,
        foresee: Foresee = lambda batch, size: (batch, Outlook("unknown")),
        refuse: bool = False,
        clock: Clock = time.time,
    ) -> None:
        context = RouteContext(store, content, limits, rights, scheduling, clock)
        self._files = FileRoutes(context)
        self._batches = BatchRoutes(context, notice, warnings, foresee, refuse)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [*self._files.routes(), *self._batches.routes()]
