"""The cost of calls."""

from decimal import Decimal

import pytest

from serve_app.ledger.prices import Prices, prices_of
from serve_app.settings.usage import PriceSettings, UsageSettings

SETTINGS = UsageSettings(
    prices={
        "demo": PriceSettings(input=2.0, cached_input=0.5, output=8.0, batch_discount=0.25),
        "plain": PriceSettings(input=1.0),
    },
    currency="EUR",
)


@pytest.fixture
def prices() -> Prices:
    found = prices_of(SETTINGS)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model", "source", "outcome", "cost"),
    [
        ("demo", "http", "ok", "10.8"),
        ("demo", "handle", "cancelled", "10.8"),
        ("demo", "batch", "ok", "8.1"),
        # The service failed: another call did the work, or none.
        ("demo", "http", "lost", 0),
        ("demo", "http", "failed", 0),
        ("demo", "warm_up", "ok", 0),
        # Cached tokens cost as others, and there is no discount, where no price says so.
        ("plain", "batch", "ok", 2),
        ("unknown", "http", "ok", 0),
    ],
)
def test_a_call_costs_what_the_prices_say(
    prices: Prices, model: str, source: str, outcome: str, cost: str | int
) -> None:
    million = 1_000_000
    found = prices.cost(
        model,
        source,
        outcome,
        prompt_tokens=2 * million,
        cached_tokens=800_000,
        output_tokens=million,
    )
    assert found == Decimal(cost)


def test_the_records_of_a_function_cost_as_input(prices: Prices) -> None:
    found = prices.cost("demo", "http", "ok", prompt_tokens=0, cached_tokens=0, output_tokens=0, cost=500_000)
    assert found == 1


def test_a_price_is_exact(prices: Prices) -> None:
    exact = Prices({"demo": PriceSettings(input=0.15)}, "USD")
    found = exact.cost("demo", "http", "ok", prompt_tokens=3, cached_tokens=0, output_tokens=0)
    # Of binary numbers it is 4.4999999999999995e-07.
    assert found == Decimal("0.00000045")


def test_an_adapter_without_a_price_has_that_of_its_model() -> None:
    prices = Prices({"demo": PriceSettings(input=1.0), "demo:words": PriceSettings(input=3.0)}, "EUR")

    def cost(adapter: str) -> Decimal:
        tokens = {"prompt_tokens": 1_000_000, "cached_tokens": 0, "output_tokens": 0}
        return prices.cost("demo", "http", "ok", **tokens, adapter=adapter)

    assert [cost(adapter) for adapter in ("", "demo:words", "demo:other")] == [1.0, 3.0, 1.0]
