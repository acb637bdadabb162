"""Both ends of the relay that carries an HTTP request over a deployment handle.

The Ingress sends method, path, headers and body; the Engine runs them through an ASGI application
and streams the answer back as bytes. The first message holds the head and the first piece of the
body; every later one is a piece of the body. An empty one is a sign of life: see `serve_app.relay.keepalive`.
"""

import asyncio
import json
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.api.errors import RequestError, engine_failed
from serve_app.api.scheduling import DEFAULT_SCHEDULING, Scheduling
from serve_app.relay.keepalive import ALIVE, KeepAlive
from serve_app.relay.resume import LOST, Resume, Trail

Message = MutableMapping[str, Any]
ASGIApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
Header = tuple[bytes, bytes]

MAX_BUFFERED_BYTES = 1 << 20
"""An application that is this far ahead of its reader waits."""

LEAVE_S = 2.0
"""Seconds that an application has to end by itself once its client has left."""

END = b"data: [DONE]\n\n"
"""The last event of a stream of the OpenAI API. Clients leave when they have it."""

_PREFIX = struct.Struct(">I?")
"""Bytes of the head, and whether the message is the whole answer."""


@dataclass(slots=True, frozen=True)
class RelayRequest:
    """An HTTP request as it crosses the handle.

    Attributes:
        scheduling: Those that its head and body state.
        arrived_at: When the client sent it, in seconds since the epoch: the clock of all machines.
        resumes: It goes on with a stream that broke elsewhere.
        token_ids: The tokens that the stream had brought, as the bytes of an `array`.
    """

    method: str
    path: str
    query: bytes
    headers: list[Header]
    body: bytes
    scheduling: Scheduling = DEFAULT_SCHEDULING
    arrived_at: float = field(default_factory=time.time)
    resumes: bool = False
    token_ids: bytes = b""

    def scheduling_now(self) -> Scheduling:
        """Return the scheduling on which it waits from now on.

        What it has waited already counts: for a replica to come, or in one that has died since. A stream
        that goes on has started in time.
        """
        scheduling = self.scheduling
        if scheduling.queue_timeout_s is None:
            return scheduling
        waited = max(0.0, time.time() - self.arrived_at)
        return scheduling._replace(
            queue_timeout_s=None if self.resumes else scheduling.queue_timeout_s - waited
        )


@dataclass(slots=True, frozen=True)
class Head:
    """The status line and headers of an answer.

    Attributes:
        resume: How the answer, a stream, could go on elsewhere. Unless that is not at all, each piece of
            its body is one that `Trail.frame` made.
    """

    status: int
    headers: list[Header]
    resume: Resume = ""

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )

    def pack(self, body: bytes, *, whole: bool = False) -> bytes:
        """Return the first message.

        Args:
            body: The first piece of the body.
            whole: It is all of the body.
        """
        text = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers]
        head = json.dumps([self.status, text, self.resume]).encode()
        return _PREFIX.pack(len(head), whole) + head + body

    @classmethod
    def unpack(cls, message: bytes) -> "tuple[Head, bytes, bool]":
        """Split the first message into the head, the first piece of the body, and whether that is all."""
        length, whole = _PREFIX.unpack_from(message)
        end = _PREFIX.size + length
        status, text, resume = json.loads(message[_PREFIX.size : end])
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in text]
        return cls(status, headers, resume), message[end:], whole


def pack_error(error: RequestError) -> bytes:
    """Return a whole answer, as one first message, for a request that was refused."""
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    return Head(error.status, headers).pack(json.dumps(error.body()).encode(), whole=True)


def error_event(error: RequestError) -> bytes:
    """Return an error as the event that ends a stream."""
    return f"data: {json.dumps(error.body())}\n\n".encode()


@dataclass(slots=True)
class _Outbox:
    """What the application has sent and the handle has not taken yet."""

    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    head: Head | None = None
    ended: bool = False
    readable: asyncio.Event = field(default_factory=asyncio.Event)
    writable: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.head = Head(message["status"], list(message.get("headers", ())))
            return
        body = message.get("body", b"")
        if body:
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
        """Whether what is here may leave.

        The event that has clients leave waits for the end that is next to come: what follows the last
        piece would find its reader gone. Unless the application waits for room before it ends.
        """
        if self.ended or self.size > MAX_BUFFERED_BYTES:
            return True
        return bool(self.pieces) and not self.pieces[-1].endswith(END)

    def take(self) -> bytes:
        body = b"".join(self.pieces)
        self.pieces.clear()
        self.size = 0
        self.readable.clear()
        self.writable.set()
        return body


async def run_app(
    app: ASGIApp,
    request: RelayRequest,
    *,
    refusal: Callable[[], RequestError | None] = lambda: None,
    trail: Trail | None = None,
    closing: Callable[[], bytes] = lambda: b"",
) -> AsyncGenerator[bytes, None]:
    """Run `request` through `app` and yield its answer as relay messages.

    Closing the generator tells the application that its client has left, and ends it. Between the messages
    there are signs of life where they take their time.

    Args:
        app: The ASGI application.
        request: The request.
        refusal: Asked before the head leaves. An error that it returns becomes the answer, in place
            of what the application made of it: by then an application that streams may have
            committed itself to status 200.
        trail: What is needed for a stream to go on elsewhere. Once its engine is lost, what the
            application still sends is dropped.
        closing: Asked when the application has sent all; what it returns goes behind the last piece.
    """
    outbox = _Outbox()
    left = asyncio.Event()
    listening = 0
    inbox: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        nonlocal listening
        if inbox:
            return inbox.pop()
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
        """Wait until something may leave, or nothing will come any more; False: a sign of life is due."""
        keepalive.sent()
        while not outbox.due and not task.done():
            if keepalive.due:
                return False
            outbox.readable.clear()
            await outbox.readable.wait()
        return True

    try:
        while not await anything_due():
            yield ALIVE
        if error := refusal():
            yield pack_error(error)
            return
        if outbox.head is None or (task.done() and not outbox.ended and not outbox.pieces):
            # The application ended without an answer: its own error comes out of the task.
            await task
            raise RuntimeError("the application sent no answer")
        head = outbox.head
        if not head.is_event_stream or (outbox.ended and not request.resumes):
            # What is whole can't break any more; only who joins two streams wants all of it to look alike.
            trail = None
        closed = outbox.ended
        body = outbox.take() + (closing() if closed else b"")
        if trail is not None and trail.resume:
            yield replace(head, resume=trail.resume).pack(trail.frame(body), whole=closed)
        else:
            yield head.pack(body, whole=closed)
        while not closed:
            if not await anything_due():
                yield ALIVE
                continue
            if trail is not None and trail.lost():
                # To the application it is an error like others: it says so and ends in good order.
                yield LOST if trail.resume else error_event(engine_failed())
                return
            if outbox.pieces or outbox.ended:
                closed = outbox.ended
                body = outbox.take() + (closing() if closed else b"")
                if body:
                    yield trail.frame(body) if trail is not None and trail.resume else body
            elif task.done() and not outbox.ended:
                await task
                raise RuntimeError("the application broke off its answer")
    finally:
        keepalive.stop()
        left.set()
        outbox.writable.set()
        _see_off(task, None if outbox.ended else LEAVE_S if listening else 0.0)


def _see_off(task: "asyncio.Future[None]", cancel_s: float | None) -> None:
    """Let an application end by itself, which may still have work to do after its last piece.

    One that listens for its client to leave is told so by `receive`, and ends what it started.
    Cancelling it at once would stop it from doing that; it is cancelled if it goes on.

    Args:
        task: Runs the application.
        cancel_s: Seconds after which it is cancelled; None: never.
    """
    timer = None if cancel_s is None else asyncio.get_running_loop().call_later(cancel_s, task.cancel)

    def done(task: "asyncio.Future[None]") -> None:
        _leaving.discard(task)
        if timer:
            timer.cancel()
        if not task.cancelled():
            # Nobody reads the answer any more; this keeps asyncio from reporting its error.
            task.exception()

    _leaving.add(task)
    task.add_done_callback(done)


_leaving: "set[asyncio.Future[None]]" = set()
"""Applications that are ending; asyncio itself doesn't keep a task alive."""


async def read_head(messages: AsyncIterator[bytes]) -> tuple[Head, bytes, bool]:
    """Read the first message of an answer: see `Head.unpack`."""
    return Head.unpack(await anext(messages))
