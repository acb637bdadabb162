"""The requests that the Ingress has answered, as metrics."""

from serve_app.telemetry import catalogue
from serve_app.telemetry.accounts import Account
from serve_app.telemetry.meters import Meters

NO_MODEL = "none"
"""The label of what reached no model: the name that a client wrote would be a series of its own."""


class RequestMetrics:
    """Reports requests that have ended.

    Args:
        meters: The instruments of `catalogue.INGRESS`.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def __call__(self, ended: list[Account]) -> None:
        """Report them."""
        for account in ended:
            if account.worth_telling:
                self._report(account)

    def _report(self, account: Account) -> None:
        record = self._meters.record
        model = account.model or NO_MODEL
        outcome = account.outcome
        record(catalogue.REQUESTS, 1, model, outcome, str(account.status))
        if outcome != "ok" or not account.model:
            return
        record(catalogue.REQUEST_SECONDS, account.seconds, model, "yes" if account.streams else "no")
        usage = account.usage
        if account.streams:
            first_s = account.first_at - account.started_at
            record(catalogue.FIRST_TOKEN, first_s, model)
            if usage and usage.output_tokens > 1:
                per_token_s = (account.seconds - first_s) / (usage.output_tokens - 1)
                record(catalogue.PER_TOKEN, per_token_s, model)
        if usage and usage.engine_s:
            record(catalogue.PATH_SECONDS, max(account.seconds - usage.engine_s, 0.0), model)
