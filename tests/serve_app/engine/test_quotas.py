"""Quotas in an Engine: calls that come past the Ingress reserve for their tenant."""

import asyncio
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import GenerateRequest
from serve_app.api.token_bound import TEMPLATE_TOKENS, TokenDemand
from serve_app.engine.quotas import EngineQuotas, generate_demand
from serve_app.relay.usage import RequestUsage
from serve_app.settings.schema import Quota, QuotasSettings
from serve_app.usage.messages import Answer, Report
from serve_app.usage.quota_service import QuotaService
from tests.serve_app.usage.fleet import START, MemoryState, inline


def context() -> int:
    return 1000


DEMAND = TokenDemand(300, output=100)


class Handle:
    """The handle of a Quotas deployment."""

    def __init__(self, quota: Quota) -> None:
        self.settings = QuotasSettings(tenants={"t": quota}, folder="/nowhere")
        self._service = QuotaService(
            self.settings, MemoryState(), wall=lambda: START, monotonic=lambda: 0.0, beside=inline
        )
        self._started = False

    def options(self, **options: Any) -> "Handle":
        assert options["method_name"] == "exchange"
        return self

    async def remote(self, report: Report) -> Answer:
        if not self._started:
            self._started = True
            self._service.start()
        return await self._service.exchange(report)

    async def used(self) -> int:
        await asyncio.sleep(0.5)
        (state,) = self._service.states()["tenant t"]
        return state.limit - state.remaining


@pytest.mark.parametrize(
    ("error", "prompt", "output", "used"),
    [
        (None, 20, 30, 50),
        (RequestError(400, "invalid_request_error", "wrong"), 0, 0, 0),
        (RequestError(429, "rate_limit_error", "the second prompt"), 20, 30, 400),
        (ConnectionError("the caller has left"), 20, 30, 400),
    ],
)
async def test_a_call_gives_back_what_it_did_not_use(
    error: Exception | None, prompt: int, output: int, used: int
) -> None:
    handle = Handle(Quota(tokens_per_day=10_000))
    quotas = EngineQuotas(handle.settings, handle)
    usage = RequestUsage()

    async def call() -> None:
        async with quotas.reserved("t", DEMAND, context, usage):
            usage.prompt_tokens, usage.output_tokens = prompt, output
            if error:
                raise error

    if error is None:
        await call()
    else:
        with pytest.raises(type(error)):
            await call()
    assert await handle.used() == used
    quotas.stop()


async def test_a_call_beyond_the_quota_is_refused() -> None:
    handle = Handle(Quota(tokens_per_day=500))
    quotas = EngineQuotas(handle.settings, handle)
    async with quotas.reserved("t", DEMAND, context, RequestUsage()):
        with pytest.raises(RequestError, match="tenant t: tokens_per_day 500"):
            async with quotas.reserved("t", DEMAND, context, RequestUsage()):
                raise AssertionError("it has run")
    quotas.stop()


async def test_what_the_ingress_has_reserved_is_not_counted_twice() -> None:
    handle = Handle(Quota(tokens_per_day=500))
    quotas = EngineQuotas(handle.settings, handle)
    usage = RequestUsage(prompt_tokens=5, output_tokens=5)
    async with quotas.reserved("t", None, context, usage):
        pass
    assert await handle.used() == 0
    quotas.stop()


async def test_without_a_deployment_nothing_is_reserved() -> None:
    quotas = EngineQuotas()
    assert not quotas.on
    async with quotas.reserved("t", DEMAND, context, RequestUsage()):
        pass
    quotas.stop()


def test_a_call_reserves_its_texts_in_bytes_and_an_answer_for_each() -> None:
    request = GenerateRequest(prompts=["é", "ab"], max_tokens=7)
    assert generate_demand(request, 50) == TokenDemand(4 + 2 * TEMPLATE_TOKENS, 2, 1, 7)
    chat = GenerateRequest(messages=[[{"role": "user", "content": "hi"}]])
    demand = generate_demand(chat, 50)
    assert (demand.prompts, demand.output) == (1, 50)
    assert demand.prompt is not None
    assert demand.prompt > TEMPLATE_TOKENS + 2
    assert generate_demand(chat, None).output is None
