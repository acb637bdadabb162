"""The client of the Quotas deployment: its calls go through a handle, under a name of their own."""

import asyncio
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.quotas.client import QuotaClient
from serve_app.quotas.handle import Handle, quota_client
from serve_app.quotas.messages import Answer, Report
from serve_app.settings.usage import Quota, QuotasSettings
from tests.progress import STILL_S
from tests.serve_app.quotas.fleet import TENANT, QuotasHandle

LIMIT_S = STILL_S
SETTINGS = QuotasSettings(tenants={TENANT: Quota(tokens_per_minute=100)}, folder="/nowhere")


class Deployment:
    """The handle of a Quotas deployment that fails at times.

    Args:
        failures: The outcomes of the first calls; None: the call is cancelled, as Serve does with the calls
            of a replica that dies.

    Attributes:
        options_given: The options that its callers set.
        holders: The names under which reports have come.
    """

    def __init__(self, *failures: Exception | None) -> None:
        self.options_given: list[dict[str, Any]] = []
        self.holders: list[str] = []
        self._failures = list(failures)
        self._handle = QuotasHandle(SETTINGS)

    def options(self, **options: Any) -> "Deployment":
        self.options_given.append(options)
        return self

    def remote(self, report: Report) -> "asyncio.Future[Answer]":
        self.holders.append(report.holder)
        if self._failures:
            failure = self._failures.pop(0)
            if failure is not None:
                raise failure
            cancelled: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            return cancelled
        return asyncio.ensure_future(self._handle.remote(report))


def client_of(handle: Handle, replica: str = "Ingress#1") -> QuotaClient:
    client = quota_client(SETTINGS, handle, replica)
    assert client is not None
    return client


async def reserve(client: QuotaClient, tokens: int) -> None:
    """Reserve tokens, and use all of them."""
    async with asyncio.timeout(LIMIT_S):
        (await client.reserve(TENANT, tokens)).settle()


@pytest.mark.parametrize(
    ("settings", "handle"),
    [(None, None), (None, Deployment()), (SETTINGS, None)],
    ids=["neither", "a handle", "settings"],
)
def test_a_service_without_quotas_has_no_client(
    settings: QuotasSettings | None, handle: Deployment | None
) -> None:
    assert quota_client(settings, handle, "Ingress#1") is None


async def test_a_report_is_one_message_to_the_deployment() -> None:
    handle = Deployment()
    client = client_of(handle)
    await reserve(client, 10)
    client.stop()
    # By reference the report would go through Ray's object store first.
    assert handle.options_given == [
        {"method_name": "exchange", "_by_reference": False, "request_serialization": "pickle"}
    ]


async def test_a_replica_that_starts_again_with_the_same_id_has_no_claim_to_its_former_tokens() -> None:
    handle = Deployment()
    before = client_of(handle)
    await reserve(before, 80)
    before.stop()
    after = client_of(handle)
    with pytest.raises(RequestError, match="tokens_per_minute 100") as refused:
        await reserve(after, 30)
    assert refused.value.status == 429
    await reserve(after, 20)
    after.stop()
    assert len(set(handle.holders)) == 2
    assert all(holder.startswith("Ingress#1#") for holder in handle.holders)


@pytest.mark.parametrize(
    "failure", [RuntimeError("the deployment has no replica yet"), None], ids=["refused", "cancelled"]
)
async def test_a_call_that_fails_is_made_again(failure: Exception | None) -> None:
    handle = Deployment(failure)
    client = client_of(handle)
    await reserve(client, 10)
    client.stop()
    assert len(set(handle.holders)) == 1
