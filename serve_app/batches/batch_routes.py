"""Routes of `/v1/batches`."""

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON, parse_body
from serve_app.batches.errors import NotFoundError, StateError, TooManyError
from serve_app.batches.forecast import REFUSED, Outlook
from serve_app.batches.limits import DAY_S, MAX_EXPIRY_S, MIN_EXPIRY_S, Limits
from serve_app.batches.objects import batch_object, list_object
from serve_app.batches.result_stream import result_stream, written
from serve_app.batches.routes import (
    RouteContext,
    bad_request,
    conflict,
    new_file_id,
    no_file,
    page_limit,
    route,
)
from serve_app.batches.states import ENDED
from serve_app.batches.stored import Batch
from serve_app.batches.validate import ENDPOINTS
from serve_app.ingress.body import small_body

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
