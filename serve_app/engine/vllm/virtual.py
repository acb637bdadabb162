"""vLLM's engine core on a simulated device and a virtual clock, in this process: for plans, and for tests."""

import time
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext

from batcher import ContinuousBatcher
from serve_app.engine.vllm.client import goals_left
from serve_app.engine.vllm.options import batcher_of, limits_of, vllm_args
from serve_app.engine.vllm.scheduler import GOALS, LiveFirst, scheduler_class
from serve_app.engine.vllm.seams import EngineCore, EngineCoreRequest
from serve_app.engine.vllm.stats import FULL
from serve_app.settings.models import LLMSettings
from serve_app.simulation.device import Device
from serve_app.simulation.profiles import Profile
from serve_app.simulation.vllm_executor import SimulatedExecutor


class VirtualClock:
    """A clock that moves only by `sleep`, and by hand.

    Attributes:
        now: The time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the time."""
        self.now += seconds


class VirtualEngine:
    """vLLM's engine core with the service's scheduler; only the time of the simulated device passes.

    Tokens are told at once, not held back.

    Args:
        time: Its clock.
        settings: The model, with its simulated device.

    Attributes:
        time: The device's clock.
        settings: The model.
        core: The engine.
        host_s: Seconds that vLLM takes between two steps, the device idle or not.
        submit_s: Seconds that each of the two parts of a submission takes.
        live_first: Whether the scheduler is the service's own; else it is vLLM's.
        stages: Stages of the pipeline.
    """

    live_first = True
    stages = 1

    def __init__(self, time: VirtualClock, settings: LLMSettings) -> None:
        args = AsyncEngineArgs.from_cli_args(vllm_args(settings))
        self.time = time
        self.settings = settings
        self.host_s = self.submit_s = 0.0
        args.scheduler_cls = self._scheduler() if self.live_first else None
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        # As an option, vLLM refuses it for an executor without workers.
        config.parallel_config.pipeline_parallel_size = self.stages
        self.core: Any = EngineCore(config, self._executor(), log_stats=True)

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
        images: Sequence[Any] = (),
        **fields: Any,
    ) -> None:
        """Add a request, whose answer has `max_tokens`.

        Args:
            name: Its name, which no other request has.
            prompt: Token ids.
            max_tokens: Tokens of its answer.
            adapter: Its adapter.
            priority: Its tier; rows have 1.
            images: Its images.
            fields: Other sampling parameters.
        """
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **fields
        )
        asked = EngineCoreRequest(
            name, prompt, [*images], params, None, time.time(), adapter, None, None, priority=priority
        )
        self.core.add_request(*self.core.preprocess_add_request(asked))

    def batcher(self) -> ContinuousBatcher:
        """Return the batcher of this engine, on its clock."""
        limits = limits_of(self.settings.batcher, self.core)
        return batcher_of(self.settings.batcher, limits, None, self.time)

    def goals(self, age_s: float, *, live: bool) -> dict[str, Any]:
        """Return the fields of `add` that tell the goals of a request, by the seconds since it was sent."""
        goals = self.settings.batcher.goals if live else None
        return {} if goals is None else {"extra_args": {GOALS: goals_left(goals, age_s)}}

    @property
    def is_full(self) -> bool:
        """Whether rows are preempted for want of blocks."""
        return bool(self.core.scheduler.kv_cache_manager.usage >= FULL)

    @property
    def busy(self) -> bool:
        """Whether there is work. Like the loop of vLLM's process, it asks before requests are taken in."""
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def step(self) -> list[Any]:
        """Go on by one call of vLLM's loop; return the outputs of requests that came."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        self.time.sleep(self.host_s)
        return [output for each in (outputs or {}).values() for output in each.outputs]

    def device(self, profile: Profile) -> Device:
        """Return a device on this engine's clock."""
        return Device(profile, self.time, self.time.sleep)

    def stop(self) -> None:
        """End the scheduler."""
        self.core.scheduler.shutdown()

    def _scheduler(self) -> type:
        clock = self.time

        class OnVirtualTime(LiveFirst):
            """The scheduler on the device's clock."""

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

    def _executor(self) -> type[SimulatedExecutor]:
        engine = self

        class Executor(SimulatedExecutor):
            """The device; a submission takes its time."""

            make_device = staticmethod(self.device)

            def execute_model(self, *arguments: Any, **options: Any) -> Any:
                output = super().execute_model(*arguments, **options)
                engine.time.sleep(engine.submit_s)
                return output

            def sample_tokens(self, *arguments: Any, **options: Any) -> Any:
                output = super().sample_tokens(*arguments, **options)
                engine.time.sleep(engine.submit_s)
                return output

        return Executor
