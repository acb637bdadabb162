"""Quotas in an Engine: reservations of calls that come past the Ingress, over a handle or from a batch."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol
from uuid import uuid4

from pydantic_core import to_json

from serve_app.api.errors import RequestError
from serve_app.api.protocol import GenerateRequest
from serve_app.api.token_bound import TEMPLATE_TOKENS, TokenDemand
from serve_app.relay.usage import RequestUsage
from serve_app.settings.schema import QuotasSettings
from serve_app.usage.messages import Answer, Report
from serve_app.usage.quota_client import QuotaClient


class Handle(Protocol):
    """The handle of the Quotas deployment."""

    def options(self, **options: Any) -> Any:
        """Return the handle with other options."""


class EngineQuotas:
    """Reservations of one Engine replica, for the quotas of tenants.

    Args:
        settings: The treatment of calls while the Quotas deployment is away; None: there are no quotas.
        handle: The deployment.
    """

    def __init__(self, settings: QuotasSettings | None = None, handle: Handle | None = None) -> None:
        self._client: QuotaClient | None = None
        if settings is None or handle is None:
            return
        method = handle.options(method_name="exchange", _by_reference=False, request_serialization="pickle")

        async def exchange(report: Report) -> Answer:
            answer: Answer = await method.remote(report)
            return answer

        self._client = QuotaClient(settings, exchange, f"engine#{uuid4().hex}")

    @property
    def on(self) -> bool:
        """True if a call may have a quota."""
        return self._client is not None

    def stop(self) -> None:
        """Renew the leases no more."""
        if self._client is not None:
            self._client.stop()

    @asynccontextmanager
    async def reserved(
        self,
        tenant: str,
        demand: TokenDemand | None,
        context: Callable[[], int | None],
        usage: RequestUsage,
    ) -> AsyncGenerator[None, None]:
        """Return a context with the tokens of a call, which gives back at its end what was not used.

        A call that breaks off uses up what it has reserved: its prompts may still run.

        Args:
            tenant: Its tenant.
            demand: What to reserve; None: nothing.
            context: Returns the context of the model, in tokens; None: it has none.
            usage: Its usage, once it has ended.

        Raises:
            RequestError: See `QuotaClient.reserve`.
        """
        if self._client is None or demand is None:
            yield
            return
        self._client.start()
        reservation = await self._client.reserve(tenant, demand.most(context()))
        try:
            yield
        except RequestError:
            # Mostly it was refused before anything ran.
            ran = usage.prompt_tokens + usage.output_tokens
            reservation.settle(None if ran else 0)
            raise
        except BaseException:
            reservation.settle()
            raise
        reservation.settle(usage.prompt_tokens + usage.output_tokens)


def generate_demand(request: GenerateRequest, max_tokens: int | None) -> TokenDemand:
    """Return the demand of a `generate` call over a handle.

    Args:
        request: The call.
        max_tokens: The config's limit for calls that state none.
    """
    if request.messages is not None:
        prompts, size = len(request.messages), len(to_json(request.messages))
    else:
        texts = request.prompts or []
        prompts, size = len(texts), sum(len(text.encode(errors="replace")) for text in texts)
    output = request.max_tokens if request.max_tokens is not None else max_tokens
    return TokenDemand(size + prompts * TEMPLATE_TOKENS, max(1, prompts), 1, output)
