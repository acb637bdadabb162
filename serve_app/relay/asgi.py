"""Runs a relayed request through an ASGI application and streams the answer back as relay messages."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message

from serve_app.api.errors import RequestError
from serve_app.relay.events import DONE, error_event
from serve_app.relay.frame import KEEP_ALIVE, LOST, Head, pack, pack_error
from serve_app.relay.keepalive import KeepAlive
from serve_app.relay.request import RelayRequest
from serve_app.relay.resume import StreamTokens
from serve_app.relay.upload import Upload
from serve_app.relay.usage import RequestUsage

MAX_BUFFERED_BYTES = 1 << 20
"""An application that is this far ahead of its reader waits."""

LEAVE_S = 2.0
"""Seconds that an application has to end by itself once its client has left."""


@dataclass(slots=True)
class _Outbox:
    """Output of the application that the handle has not taken yet.

    Attributes:
        refusal: Tells why the request has failed. What an application sends of a stream behind that, its own
            event about the error, is dropped.
    """

    refusal: Callable[[], RequestError | None]
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    head: Head | None = None
    streams: bool = False
    failed: bool = False
    ended: bool = False
    readable: asyncio.Event = field(default_factory=asyncio.Event)
    writable: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head = Head(message["status"], list(message.get("headers", ())))
            self.streams = self.head.is_event_stream
            return
        body = message.get("body", b"")
        if body and self.streams and self.refusal():
            self.failed = True
        elif body:
            self.pieces.append(body)
            self.size += len(body)
        if not message.get("more_body", False):
            self.ended = True
        if self.due:
            self.readable.set()
        if self.size > MAX_BUFFERED_BYTES and not self.ended:
            self.writable.clear()
            await self.writable.wait()

    @property
    def due(self) -> bool:
        """True if anything may leave now; DONE by itself waits for the end that comes next."""
        if self.ended or self.failed or self.size > MAX_BUFFERED_BYTES:
            return True
        return bool(self.pieces) and not self.pieces[-1].endswith(DONE)

    def take(self) -> bytes:
        """Return the bytes that may leave. DONE stays until the end: a client that has it leaves at once."""
        body = b"".join(self.pieces)
        self.pieces.clear()
        if not self.ended and body.endswith(DONE):
            body = body[: -len(DONE)]
            self.pieces.append(DONE)
        self.size = 0
        self.readable.clear()
        self.writable.set()
        return body


async def run_app(
    app: ASGIApp,
    request: RelayRequest,
    *,
    usage: RequestUsage,
    refusal: Callable[[], RequestError | None] = lambda: None,
    stream: StreamTokens | None = None,
    lost: Callable[[], bool] = lambda: False,
    upload: Upload | None = None,
) -> AsyncGenerator[bytes, None]:
    """Run `request` through `app` and yield its answer as relay messages, with keep-alives in between.

    Closing the generator tells the application that its client has left, and ends it.

    Args:
        app: The ASGI application.
        request: The request.
        usage: Filled while the application runs; it ends the answer.
        refusal: Asked before the head leaves, and for a stream until its end. An error that it returns
            becomes the answer, or the last event of the stream, in place of what the application made of it:
            an application that streams may have sent status 200.
        stream: The tokens of the stream, so that it can go on in another Engine.
        lost: Whether the engine has died. What the application still sends of a stream is then dropped.
        upload: The body, where it comes in pieces; None: the request has it.
    """
    outbox = _Outbox(refusal)
    left = asyncio.Event()
    listening = 0
    inbox: list[Message] = []
    if upload is None:
        inbox.append({"type": "http.request", "body": request.body, "more_body": False})

    async def receive() -> Message:
        nonlocal listening
        if inbox:
            return inbox.pop()
        if upload is not None and not upload.ended:
            return await upload.receive()
        listening += 1
        try:
            await left.wait()
        finally:
            listening -= 1
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": request.headers,
        "client": None,
        "server": None,
        "state": {},
    }
    task = asyncio.ensure_future(app(scope, receive, outbox.send))
    task.add_done_callback(lambda _: outbox.readable.set())
    keepalive = KeepAlive(outbox.readable.set)

    async def anything_due() -> bool:
        """Wait until something may leave or the application has ended; False: a keep-alive is due."""
        keepalive.sent()
        while not outbox.due and not task.done():
            if keepalive.due:
                return False
            outbox.readable.clear()
            await outbox.readable.wait()
        if task.done() and outbox.pieces and outbox.pieces[-1].endswith(DONE):
            # All is said; a failure behind it is not the answer's.
            outbox.ended = True
        return True

    try:
        while not await anything_due():
            yield KEEP_ALIVE
        if error := refusal():
            yield pack_error(error, request.path)
            return
        head = outbox.head
        if head is None or (task.done() and not outbox.ended and not outbox.pieces):
            # The application ended without an answer: its own error comes out of the task.
            await task
            raise RuntimeError("the application sent no answer")
        streams = outbox.streams
        # A complete answer can't break any more; only the second half of a resumed stream keeps its tokens.
        tokens = stream if streams and (not outbox.ended or request.resumes) else None
        if tokens is not None and tokens.resume:
            head = head._replace(resume=tokens.resume)
        else:
            tokens = None
        complete = outbox.ended
        body = last = outbox.take()
        yield pack(
            head=head,
            body=body,
            token_ids=b"" if tokens is None else tokens.take(),
            usage=usage if complete else None,
        )
        while not complete:
            if not await anything_due():
                yield KEEP_ALIVE
                continue
            if streams and lost():
                # The application takes it for an error like others, and would end in good order.
                yield LOST
                return
            if streams and (error := refusal()):
                body = outbox.take()
                event = error_event(error, request.path, body or last)
                usage.outcome = "failed"
                ids = b"" if tokens is None else tokens.take()
                yield pack(body=body + event, token_ids=ids, usage=usage)
                return
            if outbox.pieces or outbox.ended:
                complete = outbox.ended
                if (body := outbox.take()) or complete:
                    last = body or last
                    yield pack(
                        body=body,
                        token_ids=b"" if tokens is None else tokens.take(),
                        usage=usage if complete else None,
                    )
            elif task.done():
                await task
                raise RuntimeError("the application broke off its answer")
    finally:
        keepalive.stop()
        left.set()
        outbox.writable.set()
        _let_end(task, None if outbox.ended else LEAVE_S if listening else 0.0)


def _let_end(task: "asyncio.Future[None]", cancel_s: float | None) -> None:
    """Let an application end by itself: it may have work to do after its last piece.

    One that listens for its client to leave is told by `receive`, and ends what it started. It is cancelled
    only if it goes on.

    Args:
        task: Runs the application.
        cancel_s: Seconds after which it is cancelled; None: never.
    """
    timer = None if cancel_s is None else asyncio.get_running_loop().call_later(cancel_s, task.cancel)

    def done(task: "asyncio.Future[None]") -> None:
        _ending.discard(task)
        if timer:
            timer.cancel()
        if not task.cancelled():
            # The answer has no reader any more; this keeps asyncio from reporting the error.
            task.exception()

    _ending.add(task)
    task.add_done_callback(done)


_ending: "set[asyncio.Future[None]]" = set()
"""Applications that are ending; asyncio itself doesn't keep a task alive."""
