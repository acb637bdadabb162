from collections import Counter, deque

import pytest

from serve_app.jobs.scheduler import Shares

WEIGHTS = {"anna": 3.0, "ben": 1.0}


def starts(shares: Shares, limit: int, rows: int) -> list[str]:
    """Return the tenants of rows of which `limit` are in flight; the earliest one ends first."""
    in_flight: deque[str] = deque()
    found = []
    for _ in range(rows):
        if len(in_flight) == limit:
            shares.end(in_flight.popleft())
        tenant = min(WEIGHTS, key=lambda name: shares.turn(name, WEIGHTS[name]))
        shares.start(tenant, WEIGHTS[tenant])
        in_flight.append(tenant)
        found.append(tenant)
    while in_flight:
        shares.end(in_flight.popleft())
    return found


@pytest.mark.parametrize("limit", [1, 4, 8, 64])
def test_rows_are_shared_by_weight(limit: int) -> None:
    found = Counter(starts(Shares(), limit, 400))
    assert found["anna"] == pytest.approx(300, abs=1)


def test_a_tenant_that_joins_has_no_credit() -> None:
    shares = Shares()
    for _ in range(100):
        shares.start("ben", 1.0)
        shares.end("ben")
    assert starts(shares, 1, 40).count("ben") == pytest.approx(10, abs=1)


def test_tenants_without_batches_are_forgotten() -> None:
    shares = Shares()
    shares.start("anna", 1.0)
    shares.start("ben", 1.0)
    shares.end("ben")
    shares.keep(set())
    # One row is in flight still.
    assert shares.turn("anna", 1.0)[0] == 1
    shares.end("anna")
    shares.keep({"anna"})
    assert shares.turn("anna", 1.0)[1] > shares.turn("ben", 1.0)[1]
