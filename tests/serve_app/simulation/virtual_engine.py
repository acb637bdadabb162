"""vLLM's engine core on a simulated device, in this process and on a clock of the test."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import vllm.envs
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import core as vllm_core

from serve_app.engine.vllm.options import vllm_args
from serve_app.engine.vllm.scheduler import LiveFirst, scheduler_class
from serve_app.settings.models import LLMSettings
from serve_app.simulation import vllm_executor
from serve_app.simulation.vllm_executor import SimulatedExecutor
from tests.fakes.clock import Clock
from tests.serve_app.simulation.virtual import NUMBERS, device_of


class VirtualEngine:
    """vLLM's engine core on a simulated device.

    Args:
        time: Its clock.
        engine: Options of vLLM.
        fields: Fields of the profile beside `NUMBERS`.

    Attributes:
        time: The device's clock.
        core: The engine.
        tokens: Output tokens of each request.
        seen_at: When each came.
        ended_at: When each request ended.
        cached: Tokens of each prompt that were in the prefix cache.
        host_s: Seconds that vLLM takes between two steps, the device idle or not.
        submit_s: Seconds that each of the two parts of a submission takes.
        stages: Stages of the pipeline.
    """

    stages = 1

    def __init__(self, time: Clock, engine: dict[str, Any] | None = None, **fields: Any) -> None:
        content = {"id": "demo", "simulate": NUMBERS | fields, "engine": engine or {}}
        args = AsyncEngineArgs.from_cli_args(vllm_args(LLMSettings.model_validate(content)))
        self.time = time
        args.scheduler_cls = self._scheduler()
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        # As an option, vLLM refuses it for an executor without workers.
        config.parallel_config.pipeline_parallel_size = self.stages
        self.core = vllm_core.EngineCore(config, self._executor(), log_stats=True)
        self.tokens: dict[str, list[int]] = {}
        self.seen_at: dict[str, list[float]] = {}
        self.ended_at: dict[str, float] = {}
        self.cached: dict[str, int] = {}
        self.host_s = self.submit_s = 0.0

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self.core.scheduler

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        adapter: LoRARequest | None = None,
        priority: int = 0,
        images: Sequence[MultiModalFeatureSpec] = (),
        **fields: Any,
    ) -> None:
        """Add a request."""
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **fields
        )
        asked = EngineCoreRequest(
            name, prompt, [*images], params, None, time.time(), adapter, None, None, priority=priority
        )
        self.core.add_request(*self.core.preprocess_add_request(asked))
        self.tokens[name], self.seen_at[name] = [], []

    @property
    def busy(self) -> bool:
        """Whether there is work. Like the loop of vLLM's process, it asks before requests are taken in."""
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def step(self) -> list[EngineCoreOutput]:
        """Go on by one call of vLLM's loop; return what came."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        self.time.sleep(self.host_s)
        found = [output for each in (outputs or {}).values() for output in each.outputs]
        for output in found:
            name = output.request_id
            self.tokens[name] += output.new_token_ids
            self.seen_at[name].append(self.time.now)
            if output.finish_reason is not None:
                self.ended_at[name] = self.time.now
            if output.prefill_stats is not None:
                self.cached[name] = output.prefill_stats.num_cached_tokens
        return found

    def run(self) -> None:
        """Run until all requests are done."""
        for _ in range(20_000):
            if not self.busy:
                return
            self.step()
        raise AssertionError("the requests don't end")

    def answer(self, prompt: list[int], max_tokens: int = 20, **fields: Any) -> list[int]:
        """Return the tokens that one request gets."""
        name = f"request-{len(self.tokens)}"
        self.add(name, prompt, max_tokens, **fields)
        self.run()
        return self.tokens[name]

    def _scheduler(self) -> type | None:
        """Return the scheduler's class; None: vLLM's own."""
        return None

    def _executor(self) -> type[SimulatedExecutor]:
        engine = self

        class Executor(SimulatedExecutor):
            """Takes the time of the submission."""

            def execute_model(self, *arguments: Any, **options: Any) -> Any:
                output = super().execute_model(*arguments, **options)
                engine.time.sleep(engine.submit_s)
                return output

            def sample_tokens(self, *arguments: Any, **options: Any) -> Any:
                output = super().sample_tokens(*arguments, **options)
                engine.time.sleep(engine.submit_s)
                return output

        return Executor


class LiveFirstEngine(VirtualEngine):
    """A `VirtualEngine` with the service's own scheduler, but that each token is told at once."""

    def _scheduler(self) -> type:
        clock = self.time

        class OnVirtualTime(LiveFirst):
            """The scheduler under test, on the device's clock."""

            @staticmethod
            def clock() -> float:
                return clock.now

            @staticmethod
            def sleep(seconds: float) -> None:
                clock.sleep(seconds)

        class Built:
            """Stands for the class of the scheduler, which depends on the engine's configuration."""

            def __new__(cls, vllm_config: Any, **options: Any) -> Any:
                kind = scheduler_class(vllm_config, OnVirtualTime, held=False)
                return kind(vllm_config=vllm_config, **options)

        return Built


@contextmanager
def virtual_engines(kind: type[VirtualEngine] = VirtualEngine) -> Iterator[Callable[..., VirtualEngine]]:
    """Return what starts engines on one virtual clock; they end with the block."""
    clock = Clock()
    started: list[VirtualEngine] = []

    def start(**fields: Any) -> VirtualEngine:
        started.append(kind(clock, **fields))
        return started[-1]

    with (
        patch.object(vllm_executor, "Device", lambda profile: device_of(profile, clock)),
        # It walks through every object of this process.
        patch.object(vllm_core, "freeze_gc_heap", lambda: None),
    ):
        yield start
    for engine in started:
        engine.core.scheduler.shutdown()
    vllm.envs.disable_envs_cache()
