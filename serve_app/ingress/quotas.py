"""Quotas in the Ingress: a reservation before a request runs, and headers on its answer."""

from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.relay.usage import SCOPE_KEY, STATUS_KEY, RequestUsage
from serve_app.settings.schema import Quota
from serve_app.usage.lease_holder import Lease, Reservation
from serve_app.usage.quota_client import KeyQuota, QuotaClient

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{value}-{kind}"
    for value in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)
"""OpenAI's headers; pages of other origins may read them."""

LEASES_KEY = "saturate.leases"
"""Key of the ASGI scope under which a request has its leases."""


def key_quota(name: str, quota: Quota | None) -> KeyQuota | None:
    """Return the quota of a key as the client takes it; None: the key has none."""
    return None if quota is None else KeyQuota(name, quota)


async def reserve(
    client: QuotaClient, scope: MutableMapping[str, Any], tenant: str, tokens: int, key: KeyQuota | None
) -> Reservation:
    """Reserve a request, and note its leases for the headers of its answer.

    Raises:
        RequestError: See `QuotaClient.reserve`.
    """
    try:
        reservation = await client.reserve(tenant, tokens, key)
    except BaseException:
        scope[LEASES_KEY] = client.leases(tenant, key)
        raise
    scope[LEASES_KEY] = reservation.leases
    return reservation


class QuotaMiddleware:
    """ASGI middleware that puts OpenAI's rate limit headers on the answers of keys and tenants with quotas.

    It comes behind `AuthMiddleware`.

    Args:
        app: The application behind it.
        client: Knows the quotas.
    """

    def __init__(self, app: ASGIApp, client: QuotaClient) -> None:
        self._app = app
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Nothing runs before the first request in a replica's event loop.
        self._client.start()

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and (leases := self._leases(scope)):
                headers = [*message.get("headers", ()), *self._client.headers(leases)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, with_headers)

    def _leases(self, scope: Scope) -> Sequence[Lease]:
        leases: Sequence[Lease] | None = scope.get(LEASES_KEY)
        if leases is None and (caller := scope.get("caller")) is not None:
            # It was answered before it came to a reservation.
            leases = self._client.leases(caller.key.tenant, key_quota(caller.key.name, caller.key.quota))
        return leases or ()


class ReservedResponse(Response):
    """An answer whose request has reserved tokens, and gives back what it didn't use.

    The tokens are those of the answer's usage. Of an answer without one, an error or an answer in one piece
    has used none; one that broke off, or a stream, all that it has reserved: no more than that is known.

    Args:
        response: The answer.
        reservation: The reservation.
    """

    def __init__(self, response: Response, reservation: Reservation) -> None:
        self._response = response
        self._reservation = reservation
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and settle the reservation."""
        status = 0
        streams = complete = False

        async def observe(message: Message) -> None:
            nonlocal status, streams, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                streams = any(
                    name == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message.get("headers", ())
                )
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._response(scope, receive, observe)
        finally:
            usage: RequestUsage | None = scope.get(SCOPE_KEY)
            if usage is not None:
                self._reservation.settle(usage.prompt_tokens + usage.output_tokens)
            elif scope.get(STATUS_KEY, status) >= 400 or (complete and not streams):
                self._reservation.settle(0)
            else:
                self._reservation.settle()
