"""Ray Serve's own pages in the shape of this service's errors.

Ray Serve answers in plain text: its proxy, to which HAProxy turns while no Ingress replica is ready, with a
404 as long as it doesn't know the application, and each replica when it can't take a request.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.errors import ErrorType, RequestError, error_response

RETRY_S = 2.0
"""Seconds after which a replica is likely to be there."""

OF_SERVE = "/-/"
"""Routes of Ray Serve begin with it, for health checks."""

AWAY = {404: b"Path '", 500: b"The actor "}
"""Beginnings of Ray Serve's pages that mean that no replica is there, by status.

- It doesn't know the application yet. HAProxy, which sent the request, does.
- A replica died.
"""

_MAX_TEXT = 500

_TYPES: dict[int, ErrorType] = {404: "not_found_error", 408: "timeout_error", 500: "internal_error"}


class ServePages:
    """ASGI middleware that turns an error in plain text into one of this service."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OF_SERVE):
            await self._app(scope, receive, send)
            return
        page: Message | None = None
        text = b""

        async def watched(message: Message) -> None:
            nonlocal page, text
            if page is None:
                if message["type"] == "http.response.start" and _is_page(message):
                    page = message
                else:
                    await send(message)
                return
            text = (text + message.get("body", b""))[:_MAX_TEXT]
            if not message.get("more_body", False):
                await error_response(_error(page["status"], text), scope["path"])(scope, receive, send)

        await self._app(scope, receive, watched)


def _is_page(start: Message) -> bool:
    if start["status"] < 400:
        return False
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/plain")
        for name, value in start.get("headers", ())
    )


def _error(status: int, text: bytes) -> RequestError:
    if status > 500 or (status in AWAY and text.startswith(AWAY[status])):
        message = "No replica of this service can take the request at this moment. Try again."
        return RequestError(503, "service_unavailable", message, retry_after_s=RETRY_S)
    if status == 500:
        # It may have a stack, which is in the log too.
        return RequestError(500, "internal_error", "The service failed at this request.")
    message = text.decode("utf-8", "replace") or "The request was refused."
    return RequestError(status, _TYPES.get(status, "invalid_request_error"), message)
