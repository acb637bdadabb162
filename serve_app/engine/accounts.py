"""The accounts of a replica's calls: reservations of quotas, charges, and rows of the ledger.

A call is opened before anything is done with it, and ends once, with one count. The count settles its
reservation and is written as its row, so quotas and ledger have the same sums.
"""

import asyncio

from serve_app.api.errors import RequestError
from serve_app.api.headers import Headers
from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.writer import Ledger, Writer, new_book
from serve_app.quotas.client import Handle, QuotaClient, remote_take
from serve_app.settings.usage import UsageSettings
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage

BY_QUOTA = (b"x-saturate-refused-by", b"quota")
"""Header of a refusal by a quota: the engines may have room."""

FULL = 429
"""Status of a call for which there is no room now."""


class Accounts:
    """The accounts of one replica. It is made on the event loop of the replica.

    Args:
        model: Id of the model.
        replica: The replica.
        settings: The config's `args.usage`.
        quotas: The handle of the Quotas deployment; None: there is none.

    Attributes:
        book: The calls.

    Raises:
        SettingsError: A package that the ledger needs is missing.
    """

    def __init__(
        self, model: str, replica: str, settings: UsageSettings, quotas: Handle | None = None
    ) -> None:
        self.book: CallBook = new_book(model, replica)
        self._client: QuotaClient | None = None
        if settings.quotas is not None and quotas is not None:
            self._client = QuotaClient(settings.quotas, remote_take(quotas), self.book.name)
            self._client.start()
        self._writer = Writer(settings, self.book).start() if settings.ledger else None

    @property
    def ledger(self) -> Ledger | None:
        """The ledger; None: there is none."""
        return None if self._writer is None else self._writer.ledger

    @property
    def unlimited(self) -> int | None:
        """Calls that ran without limits while Quotas was away; None: there are no quotas."""
        return None if self._client is None else self._client.unlimited

    def open(self, request: RelayRequest, usage: RequestUsage) -> Call:
        """Return a new call, which has to be closed."""
        return self.book.open(request, usage)

    def limits(self, call: Call) -> bool:
        """Return whether a call may have a quota: then `reserve` comes before it runs."""
        request = call.request
        return self._client is not None and self._client.limits(request.scheduling.tenant, request.quota)

    async def reserve(self, call: Call, context: int | None) -> None:
        """Reserve the most that a call can use. Its end settles it.

        Args:
            call: The call.
            context: Context of the model, in tokens; None: it has none.

        Raises:
            RequestError: See `QuotaClient.reserve`.
        """
        if self._client is None:
            return
        request = call.request
        try:
            found = await self._client.reserve(
                request.scheduling.tenant, request.facts.most(context), request.key, request.quota
            )
        except RequestError as error:
            call.over_quota = error.status == FULL
            raise
        if found is not None:
            call.reservations.append(found)

    async def reserve_more(self, call: Call, tokens: int) -> None:
        """Reserve tokens of a call's prompts beyond the bound for which it has a reservation.

        Args:
            call: The call.
            tokens: The tokens.

        Raises:
            RequestError: See `QuotaClient.reserve`.
        """
        request = call.request
        if self._client is not None and call.reservations:
            found = await self._client.reserve(
                request.scheduling.tenant, tokens, request.key, request.quota, more=True
            )
            if found is not None:
                call.reservations.append(found)

    def headers(self, call: Call) -> Headers:
        """Return the rate limit headers of the answer to a call that `reserve` was asked for."""
        if self._client is None:
            return []
        request = call.request
        headers = self._client.headers(request.scheduling.tenant, request.key, request.quota)
        return [*headers, BY_QUOTA] if call.over_quota else headers

    def flush(self) -> None:
        """Write the rows that the ledger doesn't have yet."""
        if self._writer is not None:
            self._writer.flush()

    async def stop(self) -> None:
        """Write the last rows, and give reservations back."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.stop)
        if self._client is not None:
            await self._client.stop()
