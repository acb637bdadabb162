"""Requests in the Ingress, from arrival to end: the source of metrics, request log and spans."""

import re
import time
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Literal

from serve_app.api.headers import Headers, request_id
from serve_app.api.scheduling import Scheduling
from serve_app.wire.usage import RequestUsage

RequestOutcome = Literal["ok", "refused", "rejected", "expired", "failed", "cancelled"]

CONVERTOR = re.compile(r":[a-z]+}")
"""Type of a parameter in the path of a route."""

MAX_PENDING = 2_000
"""Number of ended requests that are reported at once, before the next round of the reporter."""

QUIET = {
    "/",
    "/page.css",
    "/page.js",
    "/health",
    "/ping",
    "/version",
    "/stats",
    "/stats.html",
    "/v1/models",
}
"""Routes about the service itself: probes call some of these routes every few seconds."""


class TrackedRequest:
    """One request and its answer, as the Ingress sees them.

    Attributes:
        scope: The request's ASGI scope.
        started_at: Time of arrival, on the clock of `time.monotonic`.
        first_at: Time at which the first piece of the answer was sent; 0: no piece was sent.
        ended_at: Time of the end.
        model: Id of the model; empty while it is unknown, or without a model.
        tenant: The tenant.
        status: HTTP status of the answer, even if it was known only after another status was sent; 0: no
            answer.
        streams: Whether the answer is a stream of events.
        complete: Whether the last piece of the answer was sent.
        left: Whether the client has disconnected, or the server stops.
        usage: Tokens and times from the engine.
        trace: The request's span; None without tracing.
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
        """Note the request's model and tenant."""
        self.model = model
        self.tenant = scheduling.tenant

    @property
    def request_id(self) -> str:
        """Id from the client or from HAProxy, or a new one."""
        return request_id(self.scope["headers"]) or uuid.uuid4().hex

    @property
    def route(self) -> str | None:
        """Path of the request's route, with the names of its parameters in place of their values.

        None: the request has no route. A path, or a parameter in it, may hold any text, such as a prompt.
        """
        path: str = self.scope["path"]
        if "endpoint" not in self.scope:
            return None
        if not self.scope.get("path_params"):
            return path
        # Older versions of Starlette don't set `route`.
        route = self.scope.get("route")
        prefix: str = self.scope.get("root_path", "")
        return None if route is None else prefix + CONVERTOR.sub("}", route.path)

    @property
    def reportable(self) -> bool:
        """True if the request belongs in metrics and log: probes that succeed don't."""
        return bool(self.model) or self.scope["path"] not in QUIET or 400 <= self.status < 500

    @property
    def outcome(self) -> RequestOutcome:
        """Outcome of the request."""
        # The usage comes with the last bytes, after which a client may leave before the stream's end.
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
        # An engine that fails during a stream can't change the status that was sent.
        failed = self.streams and (self.usage is None or self.usage.outcome == "failed")
        return "failed" if failed else "ok"

    @property
    def trace_id(self) -> str:
        """Id of the request's trace; there has to be one."""
        return f"{self.trace.get_span_context().trace_id:032x}"

    @property
    def seconds(self) -> float:
        """Seconds from arrival to end."""
        return self.ended_at - self.started_at


def with_request_id(scope: MutableMapping[str, Any]) -> Headers:
    """Return the headers of a request, with a new id if it has no id: log and ledger are joined by the id."""
    headers: Headers = scope["headers"]
    if not any(name == b"x-request-id" for name, _ in headers):
        headers = scope["headers"] = [*headers, (b"x-request-id", uuid.uuid4().hex.encode())]
    return headers


class RequestTracker:
    """Tracks the requests of an Ingress replica, and reports the ended requests.

    Args:
        reports: Called with all requests that have ended since the last call.
        begin: Called with each new request.

    Attributes:
        under_way: Number of requests in progress.
    """

    def __init__(
        self,
        reports: Sequence[Callable[[list[TrackedRequest]], None]],
        begin: Callable[[TrackedRequest], None] | None = None,
    ) -> None:
        self.under_way = 0
        self._reports = reports
        self._begin = begin
        self._ended: list[TrackedRequest] = []

    def open(self, request: TrackedRequest) -> None:
        """Begin to track a request."""
        self.under_way += 1
        if self._begin is not None:
            self._begin(request)

    def close(self, request: TrackedRequest) -> None:
        """End a request; it is reported later."""
        request.ended_at = time.monotonic()
        self.under_way -= 1
        if self._reports:
            self._ended.append(request)
            if len(self._ended) >= MAX_PENDING:
                self()

    def __call__(self) -> None:
        """Report the requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        for report in self._reports:
            report(ended)
