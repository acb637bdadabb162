"""One request in the Ingress, and the middleware around every request."""

import time
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response, fault_response, path_of
from serve_app.api.headers import Headers
from serve_app.api.scheduling import Scheduling, SchedulingFields, scheduling_of
from serve_app.auth.key_store import OPEN, Caller, KeyStore
from serve_app.ingress.body import BodyBudget, HeldBody
from serve_app.ingress.pages import wants_page, with_slash
from serve_app.telemetry.request_tracker import RequestTracker, TrackedRequest
from serve_app.wire.frame import is_event_stream

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{value}-{kind}"
    for value in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)
"""OpenAI's headers; pages of other origins may read them."""

_KEY = "context"
"""Key of the context in the `state` of a scope."""


class RequestContext(TrackedRequest):
    """A request from its arrival to its end: its resources, and its telemetry.

    Args:
        scope: The request's ASGI scope.
        budget: The budget of the bytes of its body.

    Attributes:
        caller: Its key; None: the service asks for none, or the path needs none.
        body: The bytes that it holds of the budget.
    """

    __slots__ = ("body", "caller")

    def __init__(self, scope: MutableMapping[str, Any], budget: BodyBudget) -> None:
        super().__init__(scope)
        self.caller: Caller | None = None
        self.body = HeldBody(budget)

    @property
    def models(self) -> Collection[str] | None:
        """Ids of the models that the caller may use; None: all."""
        return self.caller.models if self.caller else None

    @property
    def key_name(self) -> str:
        """The name of the caller's key; empty: there is none."""
        return self.caller.key.name if self.caller else ""

    def scheduling(self, headers: Headers, fields: SchedulingFields) -> Scheduling:
        """Return the scheduling of the request.

        Raises:
            RequestError: 403, the key doesn't allow it; 400, a header is wrong.
        """
        return self.caller.scheduling(headers, fields) if self.caller else scheduling_of(headers, fields)

    def observe(self, message: Message) -> None:
        """Note a message of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.streams = is_event_stream(message.get("headers", ()))
            return
        if not self.first_at:
            self.first_at = time.monotonic()
        if not message.get("more_body", False):
            self.complete = True


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """Return the context of the request with a scope."""
    context: RequestContext = scope["state"][_KEY]
    return context


class RequestMiddleware:
    """ASGI middleware that gives each request its context, and ends it.

    From outside to inside: a slash at the end of the path goes; the request is tracked; pages of other
    origins get their headers, and their preflights an answer; a valid API key is required, from one of its
    addresses; the bytes of the body are given back.

    Args:
        app: The application behind it.
        tracker: Tracks the requests.
        bodies: Counts the bytes of the bodies.
        access: The valid API keys; None: the service asks for none.
        origins: Origins whose pages may call the service. A preflight needs no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        tracker: RequestTracker,
        bodies: BodyBudget,
        access: KeyStore | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._tracker = tracker
        self._bodies = bodies
        self._access = access
        self._tracked: ASGIApp = self._admit
        if origins:
            self._tracked = CORSMiddleware(
                self._admit,
                allow_origins=list(origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["retry-after", "x-request-id", *RATE_LIMIT_HEADERS],
                max_age=600,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] == "websocket":
            # No route of the application takes websockets.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_slash(scope)
        context = RequestContext(scope, self._bodies)
        state = scope["state"] = {**scope.get("state", {}), _KEY: context}
        self._tracker.open(context)

        async def observed(message: Message) -> None:
            context.observe(message)
            await send(message)

        try:
            await self._tracked(scope, receive, observed)
        except BaseException as error:
            context.left = not isinstance(error, Exception)
            raise
        finally:
            self._tracker.close(context)
            # The two refer to each other; this spares the garbage collector a cycle per request.
            del state[_KEY]

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request that may come in, and give back the request's resources."""
        context = context_of(scope)
        if not path_of(scope):
            await with_slash(scope)(scope, receive, send)
            return
        if self._access is not None and path_of(scope) not in OPEN and not wants_page(scope):
            try:
                host, *_ = scope.get("client") or (None,)
                context.caller = self._access.authenticate(scope["headers"], host)
            except RequestError as error:
                await error_response(error, path_of(scope))(scope, receive, send)
                return
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            # `fault_response` logs the stack. Starlette's own handler is in front of this middleware, where
            # an answer has no headers for other origins.
            if context.status or isinstance(error, RequestError):
                # The answer has begun, and its connection breaks; or it is no fault.
                raise
            await (await fault_response(Request(scope), error))(scope, receive, send)
        finally:
            context.body.give_back()


def _without_slash(scope: Scope) -> Scope:
    """Return a scope whose path has no slash at its end."""
    if not scope["path"].endswith("/"):
        return scope
    prefix = scope.get("root_path", "")
    path = scope["path"].removeprefix(prefix).rstrip("/") or "/"
    return {**scope, "path": prefix + path}
