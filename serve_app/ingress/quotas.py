"""Quotas in the Ingress: a reservation before a request runs, and headers on its answer."""

from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.quotas.client import KeyQuota, QuotaClient
from serve_app.quotas.lease import Lease
from serve_app.quotas.reservation import Reservation
from serve_app.relay.usage import SCOPE_KEY, STATUS_KEY, RequestUsage
from serve_app.settings.usage import Quota

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{value}-{kind}"
    for value in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)
"""OpenAI's headers; pages of other origins may read them."""

LEASES_KEY = "saturate.leases"
"""Key of the ASGI scope under which a refused request has its leases."""

RESERVATION_KEY = "saturate.reservation"
"""Key of the ASGI scope under which a request has its reservation."""


def key_quota(name: str, quota: Quota | None) -> KeyQuota | None:
    """Return the quota of a key as the client takes it; None: the key has none."""
    return None if quota is None else KeyQuota(name, quota)


async def reserve(
    client: QuotaClient, scope: MutableMapping[str, Any], tenant: str, tokens: int, key: KeyQuota | None
) -> None:
    """Reserve a request; `QuotaMiddleware` settles it, and puts the headers of its leases on the answer.

    Raises:
        RequestError: See `QuotaClient.reserve`.
    """
    reservation = client.reserve_nowait(tenant, tokens, key)
    if reservation is None:
        try:
            reservation = await client.reserve(tenant, tokens, key)
        except BaseException:
            scope[LEASES_KEY] = client.leases(tenant, key)
            raise
    scope[RESERVATION_KEY] = reservation


class QuotaMiddleware:
    """ASGI middleware that settles reservations, and puts OpenAI's rate limit headers on answers.

    It comes behind `AuthMiddleware`. A request has used the tokens of its answer's usage. Without usage, an
    error or an answer in one piece has used none; one that broke off, or a stream, all that it has reserved:
    no more than that is known.

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
        head: Message = {}
        complete = False

        async def with_headers(message: Message) -> None:
            nonlocal head, complete
            if message["type"] == "http.response.start":
                head = message
                if leases := self._leases(scope):
                    headers = [*message.get("headers", ()), *self._client.headers(leases)]
                    message = {**message, "headers": headers}
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        finally:
            reservation: Reservation | None = scope.get(RESERVATION_KEY)
            if reservation is not None:
                usage: RequestUsage | None = scope.get(SCOPE_KEY)
                if usage is not None:
                    reservation.settle(usage.prompt_tokens + usage.output_tokens)
                elif _used_none(head, scope.get(STATUS_KEY), complete=complete):
                    reservation.settle(0)
                else:
                    reservation.settle()

    def _leases(self, scope: Scope) -> Sequence[Lease]:
        reservation: Reservation | None = scope.get(RESERVATION_KEY)
        if reservation is not None:
            return reservation.leases
        leases: Sequence[Lease] | None = scope.get(LEASES_KEY)
        if leases is None and (caller := scope.get("caller")) is not None:
            # It was answered before it came to a reservation.
            leases = self._client.leases(caller.key.tenant, key_quota(caller.key.name, caller.key.quota))
        return leases or ()


def _used_none(head: Message, status: int | None, *, complete: bool) -> bool:
    """Return whether an answer without usage has used no tokens.

    Args:
        head: The answer's first message; empty: there is none.
        status: The status that counts, if it isn't the one of the head.
        complete: The answer is whole.
    """
    if (status or head.get("status", 0)) >= 400:
        return True
    streams = any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.get("headers", ())
    )
    return complete and not streams
