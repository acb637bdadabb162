"""An answer between the task that makes it and the call of the handle that takes it."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

from starlette.types import ASGIApp, Message

from serve_app.api.errors import RequestError
from serve_app.api.headers import Headers
from serve_app.wire.frame import (
    DONE,
    ID,
    KEEP_ALIVE,
    KEEPALIVE_S,
    LOST,
    Head,
    Piece,
    ResumeMode,
    error_event,
    error_piece,
)
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage

MAX_BUFFERED_BYTES = 1 << 20
"""An application that is this far ahead of its reader waits."""

ERROR_EVENTS = (b'data: {"error"', b"event: error")
"""Beginnings of the events by which an application tells in a stream that it has failed."""

LEAVE_S = 2.0
"""Seconds that an application has to end by itself once its client has left."""


class StreamTokens:
    """The tokens of one stream that have not been sent yet.

    Attributes:
        resume: How the stream could go on elsewhere; set before its first token.
    """

    __slots__ = ("_ids", "resume")

    def __init__(self) -> None:
        self.resume: ResumeMode = ""
        self._ids = array(ID)

    def add(self, token_ids: list[int]) -> None:
        """Add the next tokens. They have to be here before the application gets their text."""
        self._ids.extend(token_ids)

    def take(self) -> bytes:
        """Return the ids of the tokens since the last call, as the bytes of an `array`."""
        ids = self._ids.tobytes()
        del self._ids[:]
        return ids


class Answer:
    """An answer that a task makes: as a whole, or by an ASGI application.

    Args:
        request: The request.
        usage: Filled while the answer is made; it ends the answer.
        refusal: Returns why the request has failed. Such an error becomes the answer, or the last event of
            its stream, in place of the application's own answer.
        lost: Whether the engine has died. Further pieces of its stream are then dropped.
        body: Returns the next ASGI message of the request's body; None: the request has it.
        buffered: Maximum bytes that an application may be ahead of the reader.
        leave_s: Seconds that an application has to end by itself once its client has left.

    Attributes:
        headers: Headers that are added to the answer.
        tokens: The tokens of the stream, so that it can go on in another Engine; None: it can't.
        explain: Returns the error that stands for a whole answer, or an event, in which the application tells
            of an error; None: its own words stay.
        begun: Whether the reader has a piece.
        ended: Whether the application has said all.
    """

    def __init__(
        self,
        request: RelayRequest,
        usage: RequestUsage,
        *,
        refusal: Callable[[], RequestError | None] = lambda: None,
        lost: Callable[[], bool] = lambda: False,
        body: Callable[[], Awaitable[Message]] | None = None,
        buffered: int = MAX_BUFFERED_BYTES,
        leave_s: float = LEAVE_S,
    ) -> None:
        self.headers: Headers = []
        self.tokens: StreamTokens | None = None
        self.explain: Callable[[Head, bytes], RequestError | None] = lambda head, body: None
        self.begun = self.ended = False
        self._request = request
        self._usage = usage
        self._refusal = refusal
        self._lost = lost
        self._rest_of_body = body
        self._most = buffered
        self._leave_s = leave_s
        self._head: Head | None = None
        self._streams = False
        self._bodies: list[bytes] = []
        self._size = 0
        self._last = b""
        self._error: RequestError | None = None
        self._failed = False
        self._received = False
        self._listening = 0
        self._left = asyncio.Event()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._sent, self._silent = True, False

    # The task that makes it

    async def run(self, app: ASGIApp) -> None:
        """Have an application make the answer.

        Raises:
            RuntimeError: The application has ended before its answer has.
        """
        request = self._request
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
        try:
            await app(scope, self._receive, self.send)
        finally:
            # All is said; a failure behind it is not the answer's.
            self.ended = self.ended or (bool(self._bodies) and self._bodies[-1].endswith(DONE))
        if not self.ended:
            raise RuntimeError("the application broke off its answer")

    async def send(self, message: Message) -> None:
        """Take an ASGI message of the answer; wait while the reader is far behind."""
        if message["type"] == "http.response.start":
            self._head = Head(message["status"], list(message.get("headers", ())))
            self._streams = self._head.is_event_stream
            return
        body = message.get("body", b"")
        if body and self._streams and self._broken(body):
            # An application that streams may have sent status 200 and makes an event of the error.
            self._failed = True
        elif body:
            self._bodies.append(body)
            self._size += len(body)
        if not message.get("more_body", False):
            self.ended = True
        if self._due:
            self._readable.set()
        if self._size > self._most and not self.ended:
            self._writable.clear()
            await self._writable.wait()

    def _broken(self, event: bytes) -> bool:
        """Return whether a stream ends with an error: its request has failed, or an event says so."""
        if self._error is None and event.startswith(ERROR_EVENTS) and not (self._refusal() or self._lost()):
            assert self._head is not None
            self._error = self.explain(self._head, event)
        return bool(self._error or self._refusal())

    def complete(self, content: bytes) -> None:
        """Give the whole answer, which is JSON."""
        self._head = Head(200, [(b"content-type", b"application/json")])
        self._bodies, self.ended = [content], True
        self._readable.set()

    def fail(self, error: RequestError) -> bool:
        """End the answer with an error; return False if the reader has a part of a whole answer.

        The connection of such an answer has to break, so that the client doesn't take a part for the whole.
        """
        if self.begun and not self._streams:
            return False
        self._error = error
        self._readable.set()
        return True

    async def _receive(self) -> Message:
        if not self._received:
            if self._rest_of_body is not None:
                message = await self._rest_of_body()
                self._received = not message.get("more_body", False)
                return message
            self._received = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        self._listening += 1
        try:
            await self._left.wait()
        finally:
            self._listening -= 1
        return {"type": "http.disconnect"}

    # The call that takes it

    async def pieces(self, making: Coroutine[None, None, None]) -> AsyncGenerator[Piece, None]:
        """Make the answer in a task, and yield its pieces, with a `KEEP_ALIVE` wherever it is silent.

        Closing the generator tells an application that its client has left, and ends the task.

        Args:
            making: Makes the answer.
        """
        task = asyncio.ensure_future(making)
        task.add_done_callback(lambda _: self._readable.set())
        self._tick()
        try:
            piece = KEEP_ALIVE
            while piece.usage is None and not piece.lost:
                self._sent, self._silent = True, False
                while not (self._due or task.done() or self._silent):
                    self._readable.clear()
                    await self._readable.wait()
                if self._due or (task.done() and self._wrong is not None):
                    piece = self._take()
                elif task.done():
                    # Its own error comes out of the task.
                    await task
                    raise RuntimeError("the answer was not made")
                else:
                    piece = KEEP_ALIVE
                yield piece
        finally:
            self._timer.cancel()
            self._left.set()
            self._writable.set()
            _let_end(task, None if self.ended else self._leave_s if self._listening else 0.0)

    def _tick(self) -> None:
        # One timer per period, not per piece: the silence lasts two of them at most.
        if not self._sent:
            self._silent = True
            self._readable.set()
        self._sent = False
        self._timer = asyncio.get_running_loop().call_later(KEEPALIVE_S / 2, self._tick)

    @property
    def _due(self) -> bool:
        """True if anything may leave now; DONE by itself waits for the end that comes next."""
        if self.ended or self._failed or self._error is not None or self._size > self._most:
            return True
        return bool(self._bodies) and not self._bodies[-1].endswith(DONE)

    @property
    def _wrong(self) -> Piece | RequestError | None:
        """The error or loss in place of the rest of the answer; None: the answer goes on."""
        if self.begun and not self._streams:
            return None
        return LOST if self._lost() else self._error or self._refusal()

    def _take(self) -> Piece:
        """Return the piece that may leave now."""
        wrong = self._wrong
        begun, self.begun = self.begun, True
        if isinstance(wrong, Piece):
            return wrong
        usage, path = self._usage, self._request.path
        if wrong is not None and begun:
            body = self._joined()
            usage.outcome = "failed"
            return Piece(None, body + error_event(wrong, path, body or self._last), self._ids(), usage)
        head, body, complete = self._head, self._joined(), self.ended
        if begun:
            self._last = body or self._last
            return Piece(None, body, self._ids(), usage if complete else None)
        assert head is not None or wrong is not None
        if head is not None and head.status >= 400 and complete and wrong is None:
            wrong = self.explain(head, body)
        if wrong is not None:
            head, body, _, _, _ = error_piece(wrong, path, usage)
            self._streams, complete = False, True
        assert head is not None
        if head.status >= 500:
            usage.outcome = "failed"
        # A complete answer can't break any more; only the second half of a resumed stream keeps its tokens.
        if not self._streams or (complete and not self._request.resumes):
            self.tokens = None
        if self.tokens is not None and self.tokens.resume:
            head = head._replace(resume=self.tokens.resume)
        else:
            self.tokens = None
        if self.headers:
            head = head._replace(headers=[*head.headers, *self.headers])
        self._last = body
        return Piece(head, body, self._ids(), usage if complete else None)

    def _ids(self) -> bytes:
        return b"" if self.tokens is None else self.tokens.take()

    def _joined(self) -> bytes:
        """Return the bytes that may leave. DONE stays until the end: a client that has it leaves at once."""
        body = b"".join(self._bodies)
        self._bodies.clear()
        if not self.ended and body.endswith(DONE):
            body = body[: -len(DONE)]
            self._bodies.append(DONE)
        self._size = 0
        self._readable.clear()
        self._writable.set()
        return body


def _let_end(task: "asyncio.Future[None]", cancel_s: float | None) -> None:
    """Let a task end by itself: an application may have work to do after its last piece.

    An application that listens for its client to leave is told so, and ends what it started. It is cancelled
    only if it goes on.

    Args:
        task: Makes the answer.
        cancel_s: Seconds after which it is cancelled; None: never.
    """
    timer = None
    if cancel_s:
        timer = asyncio.get_running_loop().call_later(cancel_s, task.cancel)
    elif cancel_s is not None:
        task.cancel()

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
"""Tasks that are ending; asyncio itself doesn't keep a task alive."""
