"""What a quota costs a call in an Engine: ``python -m tests.benchmarks.quotas``.

One process makes calls of an Engine's accounts, in pairs with and without a quota that has a limit of each
kind; none of them is reached. The service that keeps the counters runs beside them, on the same loop.
"""

import asyncio
import statistics
import sys
import time

from serve_app.api.facts import Facts
from serve_app.engine.accounts import Accounts
from serve_app.settings.usage import Quota, QuotasSettings, UsageSettings
from serve_app.wire.usage import RequestUsage, Tokens
from tests.benchmarks import command
from tests.serve_app.ledger.crashing import FakeSequence, request_of
from tests.serve_app.quotas.fleet import QuotasHandle

ROUNDS, CALLS = 21, 1_000
MANY = 1 << 40
QUOTA = Quota(tokens_per_minute=MANY, tokens_per_day=MANY, requests_per_minute=MANY, max_concurrency=MANY)
FACTS = Facts(prompt=300, output=100)
RATE_S = 0.001
"""Seconds between two calls: the Engine is busy with 1,000 calls a second."""


async def call(accounts: Accounts, tenant: str) -> float:
    """Make a call from its door to its end; return the seconds of CPU that it took."""
    began = time.perf_counter()
    request = request_of(tenant, key="ada", facts=FACTS)
    usage = RequestUsage()
    with accounts.open(request, usage) as made:
        if accounts.limits(made):
            await accounts.reserve(made, 4096)
            accounts.headers(made)
        slot = usage.begin()
        slot.count(FakeSequence(Tokens(64, 0, 64)))
        slot.end()
    return time.perf_counter() - began


async def measure() -> None:
    """Print the time of a call without and with a quota, and that of the pairs' differences."""
    settings = QuotasSettings(tenants={"limited": QUOTA}, folder="/nowhere")
    handle = QuotasHandle(settings)
    accounts = Accounts("demo", "replica", UsageSettings(quotas=settings), handle)
    for _ in range(CALLS):
        await call(accounts, "limited")
        await asyncio.sleep(RATE_S)
    pairs: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        times: dict[str, list[float]] = {"free": [], "limited": []}
        for _ in range(CALLS):
            for tenant, found in times.items():
                found.append(1e6 * await call(accounts, tenant))
            await asyncio.sleep(RATE_S)
        pairs.append((statistics.median(times["free"]), statistics.median(times["limited"])))
    without, limited = (statistics.median(column) for column in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([after - before for before, after in pairs], n=4)
    print(f"a call without a quota {without:.1f} µs, with one {limited:.1f} µs (medians)")
    print(f"difference {middle:.1f} µs, quartiles {low:.1f} to {high:.1f} ({ROUNDS} pairs of {CALLS} calls)")
    await accounts.stop()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    command.parser("tests.benchmarks.quotas", (__doc__ or "").partition("\n\n")[2]).parse_args(arguments)
    asyncio.run(measure())
    return 0


if __name__ == "__main__":
    sys.exit(main())
