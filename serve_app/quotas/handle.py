"""Client of the Quotas deployment, over its handle."""

from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

from serve_app.quotas.client import QuotaClient
from serve_app.quotas.messages import Answer, Report
from serve_app.settings.usage import QuotasSettings


class Handle(Protocol):
    """The handle of a deployment."""

    @property
    def options(self) -> Callable[..., Any]:
        """Returns the handle with other options."""


def quota_client(settings: QuotasSettings | None, handle: Handle | None, replica: str) -> QuotaClient | None:
    """Return the client of the Quotas deployment; None: there is no such deployment.

    Args:
        settings: The treatment of requests while it is away.
        handle: The deployment.
        replica: Id of this replica.
    """
    if settings is None or handle is None:
        return None
    method = handle.options(method_name="exchange", _by_reference=False, request_serialization="pickle")

    async def exchange(report: Report) -> Answer:
        answer: Answer = await method.remote(report)
        return answer

    # A replica that starts again has the same id.
    return QuotaClient(settings, exchange, f"{replica}#{uuid4().hex[:8]}")
