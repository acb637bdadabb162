"""A vLLM engine behind a token batcher."""

import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

from starlette.types import ASGIApp
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from serve_app.api.protocol import JSON
from serve_app.engine.adapters import AdapterFiles
from serve_app.engine.door import Door, EngineLanes
from serve_app.engine.grammars import Grammars
from serve_app.engine.vllm import seams
from serve_app.engine.vllm.application import build_application, hide_refusals
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.generate import GenerateCalls
from serve_app.engine.vllm.grammar_compiler import compiler
from serve_app.engine.vllm.lora import Adapters, lora_options
from serve_app.engine.vllm.options import batcher_of, limits_of, text_batcher_of, vllm_args
from serve_app.engine.vllm.plugin import zero_blocks
from serve_app.engine.vllm.sleep import VLLMSleeper
from serve_app.engine.vllm.stats import EngineStats, own_work, scheduler_figures
from serve_app.engine.vllm.warm_up import compile_nothing_on_a_cpu, warm_up
from serve_app.engine.vllm.workarounds import (
    bound_tokenizing,
    short_chats_at_once,
    validate_no_grammars,
)
from serve_app.ledger.calls import CallBook
from serve_app.settings.models import GoalSettings, LLMSettings
from serve_app.settings.telemetry import SILENT, TelemetrySettings
from serve_app.settings.turns import ShareSettings
from serve_app.settings.user_config import BatcherUserConfig
from serve_app.stats import SchedulerFigures
from serve_app.telemetry.catalogue import VLLM
from serve_app.telemetry.meters import Meters

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("ray.serve")

DEFAULT_MAX_TOKENS = 512
"""Output tokens of a `/generate` prompt where neither the request nor the config states them."""


URGENT, ADAPTERS = -1, "adapters"
"""Priority and name in the queue of changes of adapters, where the model shares its device."""

TEXTS_S = 1.0
"""Seconds that a replica which stops gives to jobs that run no model."""


def trace_requests(llm: GatedLLM, spans: "TracerProvider") -> None:
    """Have vLLM make a span of each request, in the trace that the request's headers name.

    vLLM makes spans with OpenTelemetry's global provider. Its option `otlp_traces_endpoint` would give each
    process of the engine an exporter of its own, which knows no folders and exports all requests.

    Args:
        llm: The engine, which has started.
        spans: Exports the spans.
    """
    from opentelemetry.trace import set_tracer_provider

    set_tracer_provider(spans)
    llm.observability_config.otlp_traces_endpoint = ""
    llm.output_processor.tracing_enabled = llm.traced = True


class VLLMEngine:
    """One model in vLLM, its batcher, and vLLM's own OpenAI application on top of both.

    Args:
        settings: The model.
        max_prompts: Maximum prompts in a list.
        book: Gets the work of each call.
        telemetry: Whether vLLM's metrics and spans are exported.
        salts: Whether each tenant has a part of the prefix cache of its own.

    Attributes:
        load_s: Seconds that loading the model took, with its warm-up.
        max_num_batched_tokens: Maximum tokens in a step.
        default_output: Maximum tokens of an answer of `/generate` to a request that states no limit.
        stats: The engine's statistics.
        adapters: The LoRA adapters.
        door: Admits jobs.
        generate: The work of `/generate`, once the engine has started.

    Raises:
        SettingsError: vLLM has no such option.
    """

    def __init__(
        self,
        settings: LLMSettings,
        *,
        max_prompts: int,
        book: CallBook,
        telemetry: TelemetrySettings = SILENT,
        salts: bool = False,
    ) -> None:
        seams.check()
        # vLLM has a limit of its own for the lists of one route.
        os.environ["VLLM_MAX_COMPLETION_PROMPTS"] = str(max_prompts)
        # A redirect leads from an allowed host to any host.
        os.environ["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
        files = AdapterFiles()
        options, fetched = lora_options(settings, files)
        self._args = vllm_args(settings, options)
        if self._args.enable_lora or self._args.enable_prompt_embeds or self._args.enable_mm_embeds:
            # Numbers that others have made may be NaN.
            zero_blocks()
        engine_args = AsyncEngineArgs.from_cli_args(self._args)
        compile_nothing_on_a_cpu(engine_args)
        metrics = telemetry.metrics and telemetry.engine_metrics
        self.stats = EngineStats(settings.id, Meters(VLLM) if metrics else None)
        self._spans = None
        if telemetry.traces is not None:
            # OpenTelemetry is imported only where spans are made.
            from serve_app.telemetry.tracing import provider

            self._spans = provider(telemetry.traces)
        began = time.monotonic()
        self.llm: GatedLLM = GatedLLM.from_engine_args(
            engine_args,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[self.stats.join],
        )
        self.load_s = round(time.monotonic() - began, 3)
        # vLLM adds a logger for an endpoint that nobody reads here.
        loggers = self.llm.logger_manager.stat_loggers
        loggers[:] = [each for each in loggers if type(each) is not seams.PrometheusStatLogger]
        self.adapters = self.llm.adapters = Adapters(
            settings,
            self.llm,
            files,
            fetched,
            book,
            awake=nullcontext if settings.share is None else self._awake,
        )
        if self._spans is not None:
            trace_requests(self.llm, self._spans)
        self._started = False
        self._book = book
        validate_no_grammars()
        self.llm.grammars = Grammars(partial(compiler, self.llm.vllm_config), settings.grammar_compile_cpu_s)
        self.llm.salts = salts
        self.llm.by_priority = self._args.scheduling_policy == "priority"
        self.llm.transfer_keys = settings.transfer_keys
        self._goals = self.llm.goals = settings.batcher.goals
        self._checked: GoalSettings | None = None
        self._limits = limits_of(settings.batcher, self.llm)
        slots = self.adapters.slots
        self.batcher = batcher_of(settings.batcher, self._limits, EngineLanes(slots))
        slots.on_change = self.batcher.reopen
        self.stats.preempted = self.batcher.overcommitted
        self._texts = text_batcher_of(settings.batcher, EngineLanes(slots))
        self.max_model_len: int = self.llm.model_config.max_model_len
        self.max_num_batched_tokens: int = self.llm.vllm_config.scheduler_config.max_num_batched_tokens
        self.door = self.llm.door = Door(
            self.batcher,
            self._texts,
            self.adapters,
            context=self.max_model_len,
            blocks=self.llm.blocks,
            max_values=settings.max_answer_values,
        )
        self._defaults: JSON = (
            {"max_tokens": DEFAULT_MAX_TOKENS}
            | self.llm.model_config.get_diff_sampling_param()
            | settings.sampling.sampling()
        )
        self.default_output: int = self._defaults["max_tokens"]
        self.max_tokenize_tokens = settings.max_tokenize_tokens or self.max_model_len
        bound_tokenizing(self.llm.renderer, self.max_tokenize_tokens)
        if not self._args.trust_request_chat_template:
            short_chats_at_once(self.llm.renderer)

    async def sleeper(self, share: ShareSettings) -> VLLMSleeper:
        """Return what puts the engine to sleep, between its turns on a shared device."""
        sleeper = VLLMSleeper(self.llm, share, self._book)
        await sleeper.prepare()
        return sleeper

    @property
    def died(self) -> bool:
        """True if the engine has died."""
        return bool(self.llm.errored)

    @property
    def goals(self) -> JSON | None:
        """The goals in force, by their names in `batcher.goals`; None: there are none."""
        return None if self.llm.goals is None else self.llm.goals.model_dump(exclude_none=True)

    @property
    def scheduler(self) -> SchedulerFigures | None:
        """The figures of the scheduler; None: the scheduler is vLLM's own."""
        return scheduler_figures(self.stats.scheduler) if self.stats.scheduler else None

    def check_goals(self) -> None:
        """Warn, once for each setting of the goals, of a goal that no step can meet."""
        goals, figures = self.llm.goals, self.scheduler
        if goals is None or figures is None or goals is self._checked or not figures.least_s:
            return
        self._checked = goals
        # The times are those of one stage, and a token passes all stages.
        least_s = figures.least_s * self.llm.vllm_config.parallel_config.pipeline_parallel_size
        for name, goal in goals.model_dump(exclude_none=True).items():
            if goal < least_s:
                logger.warning(
                    "batcher.goals.%s of %g s can't be met: two steps of this engine take %.3g s, the least "
                    "goal; rows crawl while live requests run",
                    name,
                    goal,
                    least_s,
                )

    @property
    def steps(self) -> int:
        """Messages that the engine has sent so far."""
        return self.stats.steps

    @property
    def busy(self) -> bool:
        """True if the engine itself has work, apart from output that is still to be sent."""
        return bool(self.llm.output_processor.has_unfinished_requests())

    def tune(self, tuning: BatcherUserConfig) -> None:
        """Change the goals and the limits of admission while requests run.

        A field left out is as `args` have it.
        """
        limits = self._limits
        # Null takes away the goals of `args`.
        self.llm.goals = tuning.goals if "goals" in tuning.model_fields_set else self._goals
        self.batcher.set_capacity(
            tuning.capacity_tokens or limits.capacity, max_running=tuning.max_running or limits.max_running
        )
        self.batcher.set_queue_size(tuning.max_queue_size or limits.max_queue_size)
        self.batcher.set_tenant_weights(
            limits.tenant_weights if tuning.tenant_weights is None else tuning.tenant_weights
        )

    async def start(self) -> tuple[ASGIApp, set[str]]:
        """Warm the engine up, start the batcher; return vLLM's application and the routes that it serves."""
        await self.adapters.start()
        with own_work(self._book):
            await warm_up(self.llm)
        if self.llm.model_config.runner_type != "pooling":
            self.llm.grammars.start()
        await self.batcher.start()
        self._started = True
        await self._texts.start()
        app, routes = await build_application(self.llm, self._args)
        self.generate = GenerateCalls(self.llm, self.adapters, app.state.online_renderer, self._defaults)
        # vLLM asks the environment for its settings several times per request.
        seams.enable_envs_cache()
        hide_refusals()
        return cast(ASGIApp, app), routes

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """Hold the device in a slot of the batcher: an engine with a slot that waits gets its turn for it.

        Before the start the engine has the device.
        """
        async with self.batcher.slot(0, priority=URGENT, tenant=ADAPTERS) if self._started else nullcontext():
            yield

    async def check_health(self) -> None:
        """Raise if the engine has died."""
        await self.llm.check_health()

    async def stop(self, timeout_s: float) -> None:
        """Finish the admitted requests, for `timeout_s` at most, then end vLLM's processes."""
        try:
            await self.batcher.stop(timeout=timeout_s)
        finally:
            await self._texts.stop(drain=False, timeout=TEXTS_S)
            self.llm.grammars.stop()
            self.llm.shutdown()
            await self.adapters.close()
            if self._spans is not None:
                self._spans.shutdown()
