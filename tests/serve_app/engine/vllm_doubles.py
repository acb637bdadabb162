"""A GatedLLM around an engine client that a test scripts; vLLM's own engine is not started."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from batcher import ContinuousBatcher
from serve_app.engine.job import Job, set_current
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.stats import EngineStats, slot_usage
from serve_app.wire.usage import Tokens
from tests.progress import STILL_S
from tests.serve_app.engine.engine_doubles import BLOCK, CONTEXT, PlayedGrammars, Site, new_job

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
        rejected: What the engine was told of refused requests.
    """

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.batcher: ContinuousBatcher | None = None
        self.costs: list[int] = []
        self.calls: list[dict[str, Any]] = []
        self.closed = 0
        self.rejected: list[Any] = []

    async def run(
        self, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        if self.batcher is not None:
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


class ScriptedLLM(AsyncLLM):  # type: ignore[misc]
    """vLLM's own client of an engine that a test plays."""

    script: Any

    def generate(self, *args: Any, **options: Any) -> Any:
        return self.script.run(*args, **options)

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], **options: Any
    ) -> None:
        self.script.rejected.append(kv_transfer_params)

    def encode(self, *args: Any, **options: Any) -> Any:
        return self.script.run(*args, **options)

    def shutdown(self, *_: Any) -> None:
        """Do nothing; the destructor calls it."""


class PlayedLLM(GatedLLM, ScriptedLLM):
    """A GatedLLM whose `super()` is the scripted client."""


def gated(script: Any, site: Site | None = None, *, by_priority: bool = False) -> GatedLLM:
    """Return a client whose engine answers from a script.

    Args:
        script: The engine.
        site: The door with all around it; None: nothing comes by way of a door.
        by_priority: vLLM schedules by priority.
    """
    # The constructor would start vLLM.
    llm: Any = PlayedLLM.__new__(PlayedLLM)
    llm.script = script
    if site is not None:
        script.batcher = site.batcher
        llm.door, llm.adapters = site.door, site.adapters
    llm.grammars = PlayedGrammars()
    llm.by_priority = by_priority
    llm.model_config = SimpleNamespace(
        max_model_len=CONTEXT,
        get_vocab_size=lambda: 1000,
        runner_type="generate",
        max_logprobs=20,
        is_diffusion=False,
    )
    llm.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, num_gpu_blocks=9),
        use_v2_model_runner=False,
    )
    llm.input_processor = SimpleNamespace(
        vllm_config=llm.vllm_config,
        generation_config_fields={},
        renderer=SimpleNamespace(get_eos_token_id=lambda: None),
        tokenizer=None,
    )
    llm.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
    result: GatedLLM = llm
    return result


async def admitted(llm: GatedLLM, job: Job | None = None) -> Job:
    """Return a job that the door has admitted; it is the running task's from now on."""
    job = job or new_job()
    await llm.door.admit(job)
    set_current(job)
    return job


async def run(
    llm: GatedLLM,
    prompt: Any = TEN,
    params: SamplingParams | None = None,
    *,
    job: Job | None = None,
    id: str = "r",
) -> list[Any]:
    """Return the results of a prompt.

    Args:
        llm: The client.
        prompt: The prompt.
        params: Its sampling.
        job: Its job, if it is not the first prompt of it; None: a new one, which is admitted.
        id: Id of the prompt.
    """
    if job is None or job.slot is None:
        job = await admitted(llm, job)
    set_current(job)
    try:
        return [each async for each in llm.generate(prompt, params or SamplingParams(max_tokens=4), id)]
    finally:
        # As an Engine does for what vLLM has refused.
        if job.slot is not None and not job.placed:
            job.slot.release()


class SteppedEngine:
    """An engine whose steps a test makes; vLLM's own output processor counts them.

    Attributes:
        stats: The counters.
        prompt: Tokens of prompts, once for all answers to a prompt.
        cached: Prompt tokens that were found in the cache, by the first answer to a prompt.
        prompts: The prompts.
    """

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.processor = OutputProcessor(None, log_stats=True)
        self.stats = EngineStats("demo")
        self.prompt = self.cached = 0
        self._begun: set[str] = set()
        self._numbers = itertools.count()

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, **options: Any
    ) -> RequestOutputCollector:
        """Do as vLLM's own method."""
        self.prompts.append(prompt)
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
        self,
        *names: str,
        tokens: int = 1,
        cached: int = 0,
        finish: bool = False,
        output: Any = None,
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
                prompt = state.parent_req.request_id if state.parent_req else name
                if prompt not in self._begun:
                    self._begun.add(prompt)
                    self.prompt += state.prompt_len
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


class SteppedLLM(AsyncLLM):  # type: ignore[misc]
    """vLLM's own client of an engine whose steps a test makes."""

    engine: SteppedEngine

    async def add_request(self, *args: Any, **options: Any) -> RequestOutputCollector:
        return await self.engine.add_request(*args, **options)

    async def abort(self, *args: Any, **options: Any) -> None:
        await self.engine.abort(*args, **options)

    def shutdown(self, *_: Any) -> None:
        """Do nothing; the destructor calls it."""


class PlayedSteps(GatedLLM, SteppedLLM):
    """A GatedLLM whose `super()` is the client of an engine in steps."""


def stepped(site: Site) -> tuple[GatedLLM, SteppedEngine]:
    """Return a client whose engine makes steps."""
    engine = SteppedEngine()
    llm: Any = PlayedSteps.__new__(PlayedSteps)
    vars(llm).update(vars(gated(Script(), site)))
    llm.engine = engine
    llm.output_processor = engine.processor
    llm.log_requests = False
    return llm, engine
