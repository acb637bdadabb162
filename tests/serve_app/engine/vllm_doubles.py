"""A GatedLLM around an engine client that the test scripts; vLLM's own engine is not started."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from batcher import ContinuousBatcher
from serve_app.engine.stream_interval import StreamInterval
from serve_app.engine.vllm_gated import GatedLLM

BLOCK = 16
CONTEXT = 128


def output(*token_ids: int, text: str = "", finish: str | None = None) -> Any:
    """Return a result of vLLM with one completion."""
    completion = SimpleNamespace(
        text=text, token_ids=list(token_ids), finish_reason=finish, stop_reason=None, index=0
    )
    return SimpleNamespace(outputs=[completion], finished=finish is not None, prompt_token_ids=[])


class Script:
    """The results of vLLM's own `generate` and `encode`, and the calls that they got.

    Attributes:
        results: Yielded by each call; an exception is raised.
        calls: The arguments of each call.
        costs: The cost that was reserved when the engine got each call.
        closed: Calls whose generator has ended.
    """

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.batcher: ContinuousBatcher | None = None
        self.costs: list[int] = []
        self.calls: list[dict[str, Any]] = []
        self.closed = 0

    async def run(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        assert self.batcher is not None
        self.costs.append(self.batcher.stats.running_cost)
        self.calls.append({"prompt": prompt, "params": params, "request_id": request_id, **options})
        try:
            for result in self.results:
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self.closed += 1


def gated(
    monkeypatch: pytest.MonkeyPatch, script: Script, batcher: ContinuousBatcher, *, by_priority: bool = False
) -> GatedLLM:
    """Return a client whose engine answers from a script."""
    for method in ("generate", "encode"):
        monkeypatch.setattr(AsyncLLM, method, lambda self, *args, **options: script.run(*args, **options))
    script.batcher = batcher
    # The constructor would start vLLM.
    llm: Any = GatedLLM.__new__(GatedLLM)
    llm.batcher = batcher
    llm.stream_interval = StreamInterval()
    llm.by_priority = by_priority
    llm.max_prompt_logprobs = 100
    llm.model_config = SimpleNamespace(max_model_len=CONTEXT, get_vocab_size=lambda: 1000)
    llm.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))
    llm.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
    # The destructor calls it.
    llm.shutdown = lambda *_: None
    result: GatedLLM = llm
    return result
