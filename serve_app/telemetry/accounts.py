"""What becomes of each request, as the Ingress sees it: the source of its metrics, its log line, its span."""

import time
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.scheduling import Scheduling
from serve_app.relay.usage import SCOPE_KEY, RequestUsage

Outcome = Literal["ok", "refused", "rejected", "expired", "failed", "cancelled"]

KEY = "saturate.account"
"""Where a request's scope holds its account."""

MAX_PENDING = 2_000
"""Requests that may have ended before they are reported, whatever the pace of the reporter."""

MAX_ID = 128

QUIET = {"/", "/health", "/stats", "/stats.html", "/v1/models"}
"""Routes that only tell of the service itself: probes ask some of them every few seconds."""


class Account:
    """One request.

    Attributes:
        scope: The request, as ASGI has it.
        started_at: When it came, on the clock of `time.monotonic`.
        first_at: When the first piece of its answer left; 0: none did.
        ended_at: When it ended.
        model: Which model has it; empty before that is known, or if there is none.
        tenant: Whose it is.
        status: The HTTP status of its answer; 0: there was none.
        streams: Its answer is a stream of events.
        complete: The last piece of its answer has left.
        left: Its client has gone, or the server stops.
        usage: What the engine says of it.
        trace: Its span, where there is tracing.
    """

    __slots__ = (
        "complete",
        "ended_at",
        "first_at",
        "left",
        "model",
        "scope",
        "started_at",
        "status",
        "streams",
        "tenant",
        "trace",
        "usage",
    )

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self.scope = scope
        self.started_at = time.monotonic()
        self.first_at = 0.0
        self.ended_at = 0.0
        self.model = ""
        self.tenant = ""
        self.status = 0
        self.streams = False
        self.complete = False
        self.left = False
        self.usage: RequestUsage | None = None
        self.trace: Any = None

    def assign(self, model: str, scheduling: Scheduling) -> None:
        """The request goes to a model."""
        self.model = model
        self.tenant = scheduling.tenant

    @property
    def request_id(self) -> str:
        """The id that its client or HAProxy gave it, or a new one."""
        for name, value in self.scope["headers"]:
            if name == b"x-request-id":
                text: str = value[:MAX_ID].decode("latin-1")
                return text
        return uuid.uuid4().hex

    @property
    def worth_telling(self) -> bool:
        """Whether it asked for an answer of a model, or for what it may not have."""
        return bool(self.model) or self.scope["path"] not in QUIET or 400 <= self.status < 500

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        # With the usage all has left; a client that knows it goes without waiting for the end.
        if not self.complete and self.usage is None:
            return "cancelled" if self.left else "failed"
        match self.status:
            case 429:
                return "rejected"
            case 408:
                return "expired"
            case status if status >= 500:
                return "failed"
            case status if status >= 400:
                return "refused"
        # An engine that fails in the middle of a stream can't change its status any more.
        return "failed" if self.streams and self.usage is None else "ok"

    @property
    def trace_id(self) -> str:
        """The id by which its trace is found, where there is tracing."""
        return f"{self.trace.get_span_context().trace_id:032x}"

    @property
    def seconds(self) -> float:
        """Seconds from its arrival to its end."""
        return self.ended_at - self.started_at


def account_of(scope: MutableMapping[str, Any]) -> Account:
    """Return the account of a request."""
    account: Account = scope[KEY]
    return account


class Accounts:
    """The requests under way, and those that have ended and are still to be reported.

    Args:
        reports: Called with all accounts that have ended since the last call.
        begin: Called with each new one.
    """

    def __init__(
        self,
        reports: Sequence[Callable[[list[Account]], None]],
        begin: Callable[[Account], None] | None = None,
    ) -> None:
        self.under_way = 0
        self._reports = reports
        self._begin = begin
        self._ended: list[Account] = []

    def open(self, scope: MutableMapping[str, Any]) -> Account:
        """Begin the account of a request."""
        account = scope[KEY] = Account(scope)
        self.under_way += 1
        if self._begin is not None:
            self._begin(account)
        return account

    def close(self, account: Account) -> None:
        """A request has ended."""
        account.ended_at = time.monotonic()
        account.usage = account.scope.get(SCOPE_KEY)
        # They hold each other, and would wait for the garbage collector.
        del account.scope[KEY]
        self.under_way -= 1
        if self._reports:
            self._ended.append(account)
            if len(self._ended) >= MAX_PENDING:
                self()

    def __call__(self) -> None:
        """Report what has ended."""
        ended, self._ended = self._ended, []
        for report in self._reports:
            report(ended)


class Accounting:
    """ASGI middleware that keeps an account of each request.

    Args:
        app: What answers.
        accounts: Where the accounts go.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account = self._accounts.open(scope)

        async def passing(message: Message) -> None:
            if message["type"] == "http.response.start":
                account.status = message["status"]
                account.streams = _is_event_stream(message.get("headers", ()))
            else:
                if not account.first_at:
                    account.first_at = time.monotonic()
                if not message.get("more_body", False):
                    account.complete = True
            await send(message)

        try:
            await self._app(scope, receive, passing)
        except BaseException as error:
            account.left = not isinstance(error, Exception)
            raise
        finally:
            self._accounts.close(account)


def _is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
