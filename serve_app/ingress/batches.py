"""Forwarding of `/v1/files` and `/v1/batches` to the Batches deployment."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import SchedulingFields
from serve_app.ingress.body import HeldBody, refuse_encoding, small_body
from serve_app.ingress.context import context_of
from serve_app.ingress.engine_call import TRIES, EngineCall, EngineResponse, Engines
from serve_app.ingress.status import BATCHES, deployment_stats
from serve_app.wire.request import RelayRequest

ROUTES = {
    "/v1/files": {"GET": "The files.", "POST": "Upload a file."},
    "/v1/files/{id}": {"GET": "A file.", "DELETE": "Delete a file."},
    "/v1/files/{id}/content": {"GET": "The content of a file."},
    "/v1/batches": {"GET": "The batches.", "POST": "Start a batch over the rows of a file."},
    "/v1/batches/{id}": {"GET": "A batch."},
    "/v1/batches/{id}/cancel": {"POST": "Cancel a batch."},
}
"""Routes of the deployment, with a sentence about each method."""

UPLOAD = "/v1/files"
"""The route whose body comes in pieces."""

PIECE_BYTES = 1 << 20
"""Bytes of an upload that travel together."""

PIECE_S = 5.0
"""Seconds after which fewer travel, so that a slow upload doesn't look like a stalled upload."""

BODY_BYTES = 1 << 17
"""Maximum bytes of the other bodies; the deployment has its own limit, below this."""


def off() -> RequestError:
    """Return the error of a service without batches."""
    message = "This service has no files and batches: its config has no `args.batches`"
    return RequestError(404, "not_found_error", message)


class Forward:
    """Sends requests to the Batches deployment.

    Args:
        handle: The deployment.
        running: Returns the number of its replicas.
    """

    def __init__(self, handle: DeploymentHandle[Any], running: Callable[[], Awaitable[int]]) -> None:
        self._engines = Engines(handle, running)
        self._put = handle.options(method_name="put", _by_reference=False, request_serialization="pickle")
        self._handle = handle
        self._running = running

    async def answer(self, request: Request, path: str, headers: list[tuple[bytes, bytes]]) -> Response:
        """Return the answer to a request.

        Args:
            request: The request.
            path: Its path below the application's prefix.
            headers: The headers to send on.

        Raises:
            RequestError: The request is refused here.
        """
        refuse_encoding(request)
        context = context_of(request.scope)
        given = request.scope["headers"]
        # The rows of a batch are of this tier, so its key has to allow it.
        creates = request.method == "POST" and path == "/v1/batches"
        fields = SchedulingFields(service_tier="flex" if creates else None)
        scheduling = context.scheduling(given, fields)._replace(key=context.key_name)
        upload = uuid4().hex if request.method == "POST" and path == UPLOAD else ""
        body = b"" if upload else await small_body(request, BODY_BYTES)
        query = request.scope["query_string"]
        relayed = RelayRequest(request.method, path, query, headers, body, scheduling, upload=upload)
        # A request that changes something is not repeated: it may be done already.
        tries = TRIES if request.method == "GET" else 1
        call = EngineCall(self._engines.ask, relayed, tries=tries)
        return _UploadResponse(call, request, self._put) if upload else EngineResponse(call)

    async def stats(self) -> JSON:
        """Return the statistics of the deployment; see `deployment_stats`."""
        return await deployment_stats(BATCHES, self._handle, self._running)


class _UploadResponse(EngineResponse):
    """An answer to a request whose body is sent in pieces meanwhile."""

    def __init__(self, call: EngineCall, request: Request, put: DeploymentHandle[Any]) -> None:
        super().__init__(call)
        self._body = request
        self._id = call.request.upload
        self._put = put

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body and the answer."""
        sending = asyncio.ensure_future(self._upload())
        try:
            await super().__call__(scope, receive, send)
        finally:
            sending.cancel()

    async def _upload(self) -> None:
        held = context_of(self._body.scope).body
        waiting = bytearray()
        since = time.monotonic()
        try:
            async for data in self._body.stream():
                waiting += data
                # Without room for more, what is here travels at once.
                room = _hold(held, len(data))
                while len(waiting) >= PIECE_BYTES or (
                    waiting and (not room or time.monotonic() - since > PIECE_S)
                ):
                    piece = bytes(waiting[:PIECE_BYTES])
                    del waiting[:PIECE_BYTES]
                    if not await self._put.remote(self._id, piece, False):
                        return
                    since = time.monotonic()
                    held.give_back()
                    room = _hold(held, len(waiting))
            await self._put.remote(self._id, bytes(waiting), True)
        except ClientDisconnect:
            # The answer has no reader.
            self._call.release()
        except Exception as error:
            # `log` logs the stack of a fault; the answer tells the client.
            self._call.log("an upload failed", error)
            self._failure = error
            self._call.release()


def _hold(held: HeldBody, size: int) -> bool:
    """Count bytes, if they have room; return whether they have."""
    try:
        held.add(size)
    except RequestError:
        return False
    return True
