"""Reservations of calls that come past the Ingress: over a handle, or from a batch."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from serve_app.api.errors import RequestError
from serve_app.api.facts import Facts
from serve_app.quotas.client import KeyQuota
from serve_app.quotas.handle import Handle, quota_client
from serve_app.relay.usage import RequestUsage
from serve_app.settings.usage import QuotasSettings


class CallQuotas:
    """Reservations of the calls of one replica.

    Args:
        settings: The treatment of calls while the Quotas deployment is away; None: there are no quotas.
        handle: The deployment.
        replica: Id of this replica.
    """

    def __init__(
        self, settings: QuotasSettings | None = None, handle: Handle | None = None, replica: str = "engine"
    ) -> None:
        self._client = quota_client(settings, handle, replica)

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
        facts: Facts,
        context: int | None,
        usage: RequestUsage,
        key: KeyQuota | None = None,
    ) -> AsyncGenerator[None, None]:
        """Return a context with the tokens of a call, which gives back at its end what was not used.

        A call that breaks off uses up what it has reserved: its prompts may still run.

        Args:
            tenant: Its tenant.
            facts: Its facts.
            context: Context of the model, in tokens; None: it has none, or it isn't known.
            usage: Its usage, once it has ended.
            key: The quota of its key, if it has one.

        Raises:
            RequestError: See `QuotaClient.reserve`.
        """
        if self._client is None:
            yield
            return
        self._client.start()
        reservation = await self._client.reserve(tenant, facts.most(context), key)
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
