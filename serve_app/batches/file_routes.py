"""Routes of `/v1/files`."""

from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response, path_of
from serve_app.batches.errors import InUseError, NotFoundError, TooManyError
from serve_app.batches.files import add_file
from serve_app.batches.limits import MAX_EXPIRY_S, MIN_EXPIRY_S, Limits
from serve_app.batches.objects import file_object, list_object
from serve_app.batches.recording import whole
from serve_app.batches.routes import (
    NUMBER,
    RouteContext,
    bad_request,
    conflict,
    new_file_id,
    no_file,
    page_limit,
    route,
)
from serve_app.batches.stored import File
from serve_app.batches.upload import PendingUploads, Upload, receive

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
