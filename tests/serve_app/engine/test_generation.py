"""Lists of prompts, on an engine that the test plays."""

from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import GenerateRequest, GenerateResponse
from serve_app.api.scheduling import Scheduling
from serve_app.engine.admission import current
from serve_app.engine.generation import Generation
from serve_app.engine.vllm.completions import Completion
from serve_app.ledger.calls import CallBook, Origin
from serve_app.relay.usage import RequestUsage


class Parts:
    """Stands for the prompts and the completions of an engine.

    Attributes:
        shares: The share of the queue that each step was for.
        waits: Whether each prompt waited for the queue.
    """

    def __init__(self) -> None:
        self.shares: list[str] = []
        self.waits: list[bool] = []

    async def tokenize(self, prompts: list[str]) -> list[list[int] | RequestError]:
        self.shares.append(current().request.share)
        return [
            RequestError(400, "invalid_request_error", "long") if prompt == "long" else [1] * len(prompt)
            for prompt in prompts
        ]

    async def render(self, chats: list[Any]) -> list[list[int]]:
        return [[1, 2, 3] for _ in chats]

    def sampling(self, request: Any) -> None:
        pass

    async def complete(self, token_ids: list[int], sampling: None, adapter: str) -> Completion:
        self.shares.append(current().request.share)
        self.waits.append(current().request.wait)
        return Completion("x" * len(token_ids), "stop", 2)


async def run(parts: Any, adapter: str = "", **fields: Any) -> GenerateResponse:
    call = CallBook("demo").open(Origin(), RequestUsage())
    request = GenerateRequest.model_validate(fields)
    return await Generation(parts, parts).run(request, Scheduling(), RequestUsage(), call, adapter)


async def test_results_are_in_the_order_of_the_prompts_with_their_tokens() -> None:
    response = await run(Parts(), prompts=["abc", "d"], details=True)
    assert response.results == ["xxx", "x"]
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (4, 4)
    assert [detail.prompt_tokens for detail in response.details or [] if detail] == [3, 1]


async def test_chats_are_rendered() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert (await run(Parts(), messages=[chat, chat])).results == ["xxx", "xxx"]


async def test_the_first_prompt_may_be_refused_and_the_others_wait_for_the_queue() -> None:
    parts = Parts()
    await run(parts, prompts=["a", "b", "c"])
    assert parts.waits == [False, True, True]


async def test_a_prompt_that_can_not_be_read_fails_the_call() -> None:
    with pytest.raises(RequestError, match="long"):
        await run(Parts(), prompts=["a", "long"])


async def test_with_partial_it_is_an_error_beside_the_results() -> None:
    response = await run(Parts(), prompts=["a", "long"], partial=True)
    assert response.results == ["x", None]
    assert response.errors is not None
    assert response.usage.prompt_tokens == 1


async def test_the_queues_know_the_adapter_of_a_call() -> None:
    parts = Parts()
    response = await run(parts, "demo:words", prompts=["a", "b"])
    assert response.results == ["x", "x"]
    assert parts.shares == ["default/demo:words"] * 3
