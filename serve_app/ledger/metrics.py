"""Metrics of the calls of a replica, by tenant, and of its ledger."""

from serve_app.ledger.calls import CallBook, Sums
from serve_app.ledger.writer import Ledger
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.tenants import TenantLabels

KINDS = ("prompt", "cached", "output")


class UsageMetrics:
    """Records the usage of tenants since the last call.

    Args:
        book: The replica's calls.
        ledger: Its ledger; None: it has no ledger.
        meters: Instruments of `catalogue.USAGE`.
        tenants: Maximum tenants with their own series.
    """

    def __init__(self, book: CallBook, ledger: Ledger | None, meters: Meters, tenants: int) -> None:
        self._book = book
        self._ledger = ledger
        self._meters = meters
        self._labels = TenantLabels(tenants)
        self._last: dict[str, Sums] = {}

    def __call__(self) -> None:
        sums = self._book.by_tenant()
        # Work without a tenant, such as the warm-up, is in vLLM's own metrics.
        sums.pop("", None)
        grown = {name: _grown(each, self._last.get(name, Sums())) for name, each in sums.items()}
        self._last = sums
        self._labels.round({name: each.prompt + each.output + each.cost for name, each in grown.items()})
        for name, each in grown.items():
            self._record(self._labels.label(name), each)
        if self._ledger is not None:
            model = self._book.model
            self._meters.count(catalogue.USAGE_ROWS, self._ledger.written, model)
            self._meters.count(catalogue.USAGE_DROPPED, self._ledger.dropped, model)
            self._meters.record(catalogue.USAGE_BEHIND, self._ledger.behind_s, model)

    def _record(self, tenant: str, grown: Sums) -> None:
        record, model = self._meters.record, self._book.model
        if grown.calls > 0:
            record(catalogue.USAGE_CALLS, grown.calls, model, tenant)
        for kind, tokens in zip(KINDS, grown[1:4], strict=True):
            if tokens > 0:
                record(catalogue.USAGE_TOKENS, tokens, model, tenant, kind)


def _grown(now: Sums, before: Sums) -> Sums:
    return Sums(*(new - old for new, old in zip(now, before, strict=True)))
