"""The handle of a Batches deployment that runs in the test."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.serve.exceptions import ReplicaUnavailableError

from serve_app.jobs.service import BatchService
from serve_app.wire.request import RelayRequest
from tests.serve_app.ingress.engine_doubles import Answer


class Handle:
    """The handle.

    Attributes:
        service: The deployment; None: its replica is gone.
        failure: Raised for a piece of an upload.
        pieces: Sizes of the pieces of uploads that have come.
        asked: Requests that have come.
    """

    def __init__(self, service: BatchService | None) -> None:
        self.service = service
        self.failure: Exception | None = None
        self.pieces: list[int] = []
        self.asked: list[RelayRequest] = []

    def options(self, *, method_name: str, **options: Any) -> Any:
        """Return the handle of a method."""
        return {"relay": _Relay, "put": _Put, "stats": _Stats}[method_name](self)


class _Method:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def _service(self) -> BatchService:
        if self._handle.service is None:
            raise ReplicaUnavailableError("the replica is gone")
        return self._handle.service


class _Cancellable(Answer):
    """An answer that ends when its call is cancelled, as that of a handle does."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message = asyncio.ensure_future(super().__anext__())
        stopped = asyncio.ensure_future(self.stopped.wait())
        try:
            await asyncio.wait((message, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                raise asyncio.CancelledError
            return message.result()
        finally:
            message.cancel()
            stopped.cancel()


class _Relay(_Method):
    def remote(self, request: RelayRequest) -> Answer:
        self._handle.asked.append(request)
        return _Cancellable(self._messages(request))

    async def _messages(self, request: RelayRequest) -> AsyncIterator[bytes]:
        async for message in self._service.relay(request):
            yield message


class _Put(_Method):
    def remote(self, upload: str, data: bytes, last: bool) -> "asyncio.Future[bool]":
        self._handle.pieces.append(len(data))
        if self._handle.failure is not None:
            raise self._handle.failure
        return asyncio.ensure_future(self._service.uploads.put(upload, data, last))


class _Stats(_Method):
    def remote(self) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._service.stats())
