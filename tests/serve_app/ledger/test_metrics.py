"""Metrics of what tenants use."""

from pathlib import Path

from serve_app.ledger.calls import CallBook
from serve_app.ledger.metrics import UsageMetrics
from serve_app.ledger.writer import Ledger
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.wire.usage import Tokens
from tests.serve_app.ledger.crashing import FakeSequence, begun, call_of, ran
from tests.serve_app.telemetry.instruments import Instruments


def metrics_of(book: CallBook, ledger: Ledger | None = None) -> tuple[UsageMetrics, Instruments]:
    """Return the metrics of a replica and their instruments."""
    made = Instruments()
    return UsageMetrics(book, ledger, Meters(catalogue.USAGE, made.make), 20), made


def test_tokens_are_counted_as_they_are_made_and_once() -> None:
    book = CallBook("demo")
    metrics, made = metrics_of(book)
    call = call_of(book, "acme")
    sequence = FakeSequence(Tokens(10, 4, 3))
    slot = begun(call, sequence)
    metrics()
    sequence.now = Tokens(10, 4, 5)
    metrics()
    metrics()
    tokens = {kind: made.total(catalogue.USAGE_TOKENS, "demo", "acme", kind) for kind in ("prompt", "output")}
    assert tokens == {"prompt": 10, "output": 5}
    assert made.of(catalogue.USAGE_TOKENS, "demo", "acme", "cached") == [4]
    assert made.series(catalogue.USAGE_CALLS) == set()
    slot.end()
    call.close()
    metrics()
    assert made.total(catalogue.USAGE_CALLS, "demo", "acme") == 1
    assert made.total(catalogue.USAGE_TOKENS, "demo", "acme", "output") == 5


def test_work_that_no_tenant_has_asked_for_has_no_series() -> None:
    book = CallBook("demo")
    metrics, made = metrics_of(book)
    ran(book, Tokens(1, 0, 1), "")
    metrics()
    assert made.values == {}


def test_the_ledger_tells_what_it_has_written_and_dropped(tmp_path: Path) -> None:
    book = CallBook("demo")
    ledger = Ledger(book, tmp_path)
    metrics, made = metrics_of(book, ledger)
    ran(book, Tokens(1, 0, 1))
    ledger.round()
    ledger.finish()
    metrics()
    assert made.of(catalogue.USAGE_ROWS, "demo") == [1]
    assert made.of(catalogue.USAGE_DROPPED, "demo") == []
    assert made.of(catalogue.USAGE_BEHIND, "demo")[0] < 60
