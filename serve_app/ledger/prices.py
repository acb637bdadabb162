"""Prices of models, and the cost of calls in the ledger, in exact decimals."""

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

from serve_app.settings.usage import PriceSettings, UsageSettings
from serve_app.wire.request import Source
from serve_app.wire.usage import Outcome

FILE = "prices.json"
"""Name of the file with the prices in a ledger."""

MILLION = 1_000_000

FREE: frozenset[Outcome] = frozenset({"lost", "failed"})
"""Outcomes that cost nothing: the service failed; if there was an answer, another call produced it."""

OWN: frozenset[Source] = frozenset({"warm_up"})
"""Sources of calls that no client has sent."""

NOTHING = Decimal(0)


class Prices(NamedTuple):
    """Prices by model.

    Attributes:
        models: The price of each model.
        currency: Their currency.
    """

    models: Mapping[str, PriceSettings]
    currency: str

    def cost(
        self,
        model: str,
        source: str,
        outcome: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        cost: int = 0,
        adapter: str = "",
    ) -> Decimal:
        """Return the cost of calls of one kind, in `currency`.

        Args:
            model: Their model; a model without a price costs nothing.
            source: Their origin.
            outcome: Their outcome.
            prompt_tokens: As in a `LedgerRow`.
            cached_tokens: As in a `LedgerRow`.
            output_tokens: As in a `LedgerRow`.
            cost: As in a `LedgerRow`.
            adapter: Their adapter, whose own price overrides the model's price.
        """
        price = self.models.get(adapter) or self.models.get(model)
        if price is None or outcome in FREE or source in OWN:
            return NOTHING
        cached_price = price.input if price.cached_input is None else price.cached_input
        full = (
            (prompt_tokens - cached_tokens + cost) * _exact(price.input)
            + cached_tokens * _exact(cached_price)
            + output_tokens * _exact(price.output)
        )
        return full / MILLION * (1 - _exact(price.batch_discount) if source == "batch" else 1)


def _exact(price: float) -> Decimal:
    """Return a price exactly as in the config: 0.15 has no exact binary form."""
    return Decimal(str(price))


def prices_of(settings: UsageSettings) -> Prices | None:
    """Return the prices of a config; None: it has no prices."""
    return Prices(settings.prices, settings.currency) if settings.prices else None


def pack(settings: UsageSettings) -> bytes:
    """Return the prices of a config as the ledger keeps them beside its rows."""
    models = {name: price.model_dump() for name, price in settings.prices.items()}
    return json.dumps({"currency": settings.currency, "prices": models}, indent=1).encode()


def unpack(data: bytes) -> Prices | None:
    """Read the prices that `pack` wrote; None: there are no prices.

    Raises:
        ValueError: The data isn't from `pack`.
    """
    found = UsageSettings.model_validate(json.loads(data))
    return prices_of(found)
