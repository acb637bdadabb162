"""A GatedLLM around an engine client that the test scripts; vLLM's own engine is not started."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from batcher import ContinuousBatcher
from serve_app.engine.stream_interval import PieceRate
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.stats import UnreportedStats, slot_usage
from serve_app.relay.usage import Tokens
from tests.progress import STILL_S

BLOCK = 16
CONTEXT = 128
LIMIT_S = STILL_S
TEN = tokens_input(list(range(10)))
"""A prompt of ten tokens."""


def output(*token_ids: int, text: str = "", finish: str | None = None) -> Any:
    """Return a result of vLLM with one completion."""
    completion = SimpleNamespace(
        text=text, token_ids=list(token_ids), finish_reason=finish, stop_reason=None, index=0
    )
    return SimpleNamespace(outputs=[completion], finished=finish is not None, prompt_token_ids=[])


class Taken:
    """Sequences that a script has begun: the prompt once for each answer, and the tokens of its results."""

    def __init__(self, prompt: Any, params: Any) -> None:
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        self._prompt = len(ids or ()) * getattr(params, "n", 1)
        self._delta = getattr(params, "output_kind", None) is RequestOutputKind.DELTA
        self._output = 0

    def add(self, result: Any) -> None:
        """Add a result."""
        outputs = getattr(result, "outputs", ())
        tokens = sum(len(each.token_ids) for each in outputs)
        self._output = self._output + tokens if self._delta else tokens

    def tokens(self) -> Tokens:
        return Tokens(self._prompt, 0, self._output)

    def ended(self) -> bool:
        return False


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
        taken = Taken(prompt, params)
        if (slot := slot_usage.get()) is not None:
            slot.count(taken)
        try:
            for result in self.results:
                if isinstance(result, BaseException):
                    raise result
                taken.add(result)
                yield result
        finally:
            self.closed += 1


class HeldScript(Script):
    """A script whose calls end when `go` is set.

    Attributes:
        started: The ids of the calls.
        go: Lets them end.
    """

    def __init__(self) -> None:
        super().__init__(output(1, finish="stop"))
        self.started: list[str] = []
        self.go = asyncio.Event()

    async def run(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        self.started.append(request_id)
        await self.go.wait()
        async for result in super().run(prompt, params, request_id, **options):
            yield result


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
    llm.piece_rate = PieceRate()
    llm.by_priority = by_priority
    llm.max_prompt_logprobs = 100
    llm.model_config = SimpleNamespace(
        max_model_len=CONTEXT, get_vocab_size=lambda: 1000, runner_type="generate"
    )
    llm.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, num_gpu_blocks=9), use_v2_model_runner=False
    )
    llm.input_processor = SimpleNamespace(
        vllm_config=llm.vllm_config,
        generation_config_fields={},
        renderer=SimpleNamespace(get_eos_token_id=lambda: None),
        tokenizer=None,
    )
    llm.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
    # The destructor calls it.
    llm.shutdown = lambda *_: None
    result: GatedLLM = llm
    return result


async def run(llm: Any, prompt: Any = TEN, params: SamplingParams | None = None) -> list[Any]:
    """Return the results of a request."""
    async with asyncio.timeout(LIMIT_S):
        return [each async for each in llm.generate(prompt, params or SamplingParams(max_tokens=4), "r")]


class SteppedEngine:
    """An engine whose steps a test makes; vLLM's own output processor counts them.

    Attributes:
        stats: The counters.
        cached: Prompt tokens that were found in the cache.
    """

    def __init__(self) -> None:
        self.processor = OutputProcessor(None, log_stats=True)
        self.stats = UnreportedStats(None)
        self.cached = 0
        self._numbers = itertools.count()

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, **options: Any
    ) -> RequestOutputCollector:
        """Do as vLLM's own method."""
        name = f"{request_id}-{next(self._numbers)}"
        queue = RequestOutputCollector(params.output_kind, name)
        request = self._request(prompt, params, request_id, name)
        if isinstance(params, SamplingParams) and params.n > 1:
            parent = ParentRequest(request)
            for index in range(params.n):
                child, own = parent.get_child_info(index)
                self.processor.add_request(
                    self._request(prompt, own, request_id, child), None, parent, index, queue
                )
        else:
            self.processor.add_request(request, None, None, 0, queue)
        return queue

    async def abort(self, request_id: str, internal: bool = False) -> None:
        """Do as vLLM's own method."""
        self.processor.abort_requests([request_id], internal)

    def _request(self, prompt: Any, params: Any, external: str, name: str) -> EngineCoreRequest:
        sampling = params if isinstance(params, SamplingParams) else None
        pooling = None if sampling else params
        return EngineCoreRequest(
            name,
            prompt["prompt_token_ids"],
            None,
            sampling,
            pooling,
            0.0,
            None,
            None,
            None,
            external_req_id=external,
        )

    @property
    def running(self) -> list[str]:
        """The sequences that run."""
        return list(self.processor.request_states)

    def step(
        self, *names: str, tokens: int = 1, cached: int = 0, finish: bool = False, output: Any = None
    ) -> None:
        """Make a step.

        Args:
            names: Sequences that get tokens; by default all. Those that have ended meanwhile get them too.
            tokens: Tokens of each.
            cached: Prompt tokens in the cache, of a sequence that gets its first tokens.
            finish: The sequences end with it.
            output: The result of a pooling model.
        """
        outputs = []
        for name in names or self.running:
            state = self.processor.request_states.get(name)
            prefill = None
            if state is not None and state.is_prefilling:
                prefill = PrefillStats()
                cached = min(cached, state.prompt_len)
                prefill.set(state.prompt_len, cached, 0)
                self.cached += cached
            outputs.append(
                EngineCoreOutput(
                    name,
                    [] if output is not None else [7] * tokens,
                    finish_reason=FinishReason.LENGTH if finish else None,
                    prefill_stats=prefill,
                    pooling_output=output,
                )
            )
        stats = IterationStats()
        self.processor.process_outputs(outputs, 1.0, stats)
        self.stats.record(None, stats)


def stepped(monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher) -> tuple[GatedLLM, SteppedEngine]:
    """Return a client whose engine makes steps."""
    engine = SteppedEngine()
    with monkeypatch.context() as patch:
        # The constructor of the client alone: the methods of vLLM's client are its own.
        llm = gated(patch, Script(), batcher)
    for method in ("add_request", "abort"):
        own = getattr(engine, method)
        monkeypatch.setattr(AsyncLLM, method, lambda self, *args, own=own, **options: own(*args, **options))
    llm.output_processor = engine.processor
    llm.log_requests = False
    return llm, engine
