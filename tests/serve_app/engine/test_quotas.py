"""Calls that come past the Ingress reserve for their tenant and key."""

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.facts import Facts
from serve_app.engine.quotas import CallQuotas
from serve_app.quotas.client import KeyQuota
from serve_app.relay.usage import RequestUsage
from serve_app.settings.usage import Quota, QuotasSettings
from tests.serve_app.quotas.fleet import QuotasHandle

CONTEXT = 1000
LIMIT = 10_000
FACTS = Facts(prompt=300, output=100)


def handle_of(quota: Quota) -> QuotasHandle:
    return QuotasHandle(QuotasSettings(tenants={"t": quota}, folder="/nowhere"))


async def used(handle: QuotasHandle) -> int:
    return LIMIT - await handle.left("tenant t", "tokens_per_day")


@pytest.mark.parametrize(
    ("error", "prompt", "output", "taken"),
    [
        (None, 20, 30, 50),
        (RequestError(400, "invalid_request_error", "wrong"), 0, 0, 0),
        (RequestError(429, "rate_limit_error", "the second prompt"), 20, 30, 400),
        (ConnectionError("the caller has left"), 20, 30, 400),
    ],
)
async def test_a_call_gives_back_what_it_did_not_use(
    error: Exception | None, prompt: int, output: int, taken: int
) -> None:
    handle = handle_of(Quota(tokens_per_day=LIMIT))
    quotas = CallQuotas(handle.settings, handle)
    usage = RequestUsage()

    async def call() -> None:
        async with quotas.reserved("t", FACTS, CONTEXT, usage):
            usage.prompt_tokens, usage.output_tokens = prompt, output
            if error:
                raise error

    if error is None:
        await call()
    else:
        with pytest.raises(type(error)):
            await call()
    assert await used(handle) == taken
    quotas.stop()


async def test_a_call_beyond_the_quota_is_refused() -> None:
    handle = handle_of(Quota(tokens_per_day=500))
    quotas = CallQuotas(handle.settings, handle)
    async with quotas.reserved("t", FACTS, CONTEXT, RequestUsage()):
        with pytest.raises(RequestError, match="tenant t: tokens_per_day 500"):
            async with quotas.reserved("t", FACTS, CONTEXT, RequestUsage()):
                raise AssertionError("it has run")
    quotas.stop()


async def test_a_call_counts_for_its_key_too() -> None:
    handle = handle_of(Quota(tokens_per_day=LIMIT))
    quotas = CallQuotas(handle.settings, handle)
    key = KeyQuota("ada", Quota(tokens_per_day=500))
    usage = RequestUsage()
    async with quotas.reserved("t", FACTS, CONTEXT, usage, key):
        with pytest.raises(RequestError, match="key ada: tokens_per_day 500"):
            async with quotas.reserved("t", FACTS, CONTEXT, RequestUsage(), key):
                raise AssertionError("it has run")
        usage.prompt_tokens = 70
    assert await used(handle) == 70
    quotas.stop()


async def test_without_a_deployment_nothing_is_reserved() -> None:
    quotas = CallQuotas()
    assert not quotas.on
    async with quotas.reserved("t", FACTS, CONTEXT, RequestUsage()):
        pass
    quotas.stop()
