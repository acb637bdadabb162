"""A vLLM engine behind a token batcher.

The imports are those of vLLM 0.32; they move between minor versions.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from typing import cast

from starlette.types import ASGIApp
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.usage.usage_lib import UsageContext
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from batcher import Goals
from serve_app.api.protocol import JSON
from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.grammar_check import GrammarCheck
from serve_app.engine.lora_options import lora_options
from serve_app.engine.stream_interval import PieceRate
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm.adapters import Adapters
from serve_app.engine.vllm.application import build_application, describe_application
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.completions import Completions
from serve_app.engine.vllm.media import use_allowed_hosts
from serve_app.engine.vllm.metrics import EngineMetrics
from serve_app.engine.vllm.options import batcher_of, limits_of, vllm_args
from serve_app.engine.vllm.plugin import zero_blocks
from serve_app.engine.vllm.prompts import Prompts
from serve_app.engine.vllm.refusal import hide_refusals
from serve_app.engine.vllm.sleep import VLLMSleeper
from serve_app.engine.vllm.steps import StepTimer
from serve_app.engine.vllm.tokenizing import bound_tokenizing, render_short_chats_at_once
from serve_app.engine.vllm.usage import EngineCounters, count_sequences, set_part
from serve_app.engine.vllm.warm_up import compile_nothing_on_a_cpu, warm_up
from serve_app.engine.vllm.workarounds import count_outputs, refuse_media
from serve_app.ledger.calls import CallBook, Origin
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.turns import ShareSettings
from serve_app.settings.user_config import BatcherUserConfig

logger = logging.getLogger("ray.serve")

DEFAULT_MAX_TOKENS = 512
"""Output tokens of a `/generate` prompt where neither the request nor the config states them."""


class VLLMEngine:
    """One model in vLLM, its batcher, and vLLM's own OpenAI application on top of both.

    Args:
        settings: The model.
        max_prompts: Most prompts in a list.
        metrics: Whether vLLM's own metrics go to Ray's endpoint.
        book: Gets the work of each call.
        exact: Whether vLLM's statistics, of which the work is counted, are on in any case.

    Attributes:
        counters: vLLM's own counters; None: its statistics may be off.
        adapters: The LoRA adapters.
        completions: The completions of `/generate`.
        prompts: Its prompts, once the engine has started.
        describe: Describes vLLM's application as `describe_application` does, once the engine has started;
            the first call takes a second.

    Raises:
        SettingsError: vLLM has no such option.
    """

    describe: Callable[[], JSON]

    def __init__(
        self,
        settings: LLMSettings,
        *,
        max_prompts: int,
        book: CallBook,
        metrics: bool = False,
        exact: bool = False,
    ) -> None:
        use_allowed_hosts()
        if not settings.multimodal:
            refuse_media()
        # vLLM has a limit of its own for the lists of one route.
        os.environ["VLLM_MAX_COMPLETION_PROMPTS"] = str(max_prompts)
        files = AdapterFiles()
        options, fetched = lora_options(settings, files)
        self._args = vllm_args(settings, options)
        if self._args.enable_lora or self._args.enable_prompt_embeds or self._args.enable_mm_embeds:
            # Numbers that others have made may be NaN.
            zero_blocks()
        engine_args = AsyncEngineArgs.from_cli_args(self._args)
        compile_nothing_on_a_cpu(engine_args)
        steps = StepTimer()
        counters = EngineCounters()
        self.counters = counters if metrics or exact else None
        self.llm: GatedLLM = GatedLLM.from_engine_args(
            engine_args,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[
                *([lambda *_: steps] if settings.batcher.goals else []),
                *([EngineMetrics] if metrics else []),
                # vLLM has statistics wherever there is a logger for them.
                *([lambda *_: counters] if self.counters else []),
            ],
        )
        self.adapters = self.llm.adapters = Adapters(settings, self.llm, files, fetched, book)
        self._book = book
        count_sequences(self.llm, book)
        self.llm.piece_rate = PieceRate()
        self.llm.by_priority = self._args.scheduling_policy == "priority"
        self.llm.max_prompt_logprobs = settings.max_prompt_logprobs
        self._limits = limits_of(settings.batcher, self.llm)
        self.batcher = self.llm.batcher = steps.batcher = batcher_of(settings.batcher, self._limits)
        self.max_model_len: int = self.llm.model_config.max_model_len
        defaults: JSON = (
            {"max_tokens": DEFAULT_MAX_TOKENS}
            | self.llm.model_config.get_diff_sampling_param()
            | settings.sampling.sampling()
        )
        self.completions = Completions(self.llm, self.adapters, defaults, self.max_model_len)
        self._tokenizer = self.llm.get_tokenizer()
        self.max_tokenize_tokens = settings.max_tokenize_tokens or self.max_model_len
        self._texts = TokenizingQueue(
            settings.batcher.max_queue_size,
            self.llm.model_config.renderer_num_workers,
            settings.batcher.tenant_weights,
        )
        bound_tokenizing(self.llm.renderer, self._texts, self.max_tokenize_tokens)
        if not self._args.trust_request_chat_template:
            render_short_chats_at_once(self.llm.renderer)
        self.steps = 0
        count_outputs(self.llm.engine_core, self._count_step)

    def _count_step(self) -> None:
        self.steps += 1

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
    def busy(self) -> bool:
        """True if the engine itself has work, apart from output that is still to be sent."""
        return bool(self.llm.output_processor.has_unfinished_requests())

    def tune(self, tuning: BatcherUserConfig) -> None:
        """Change the limits of admission while requests run; a field left out is as `args` have it.

        Raises:
            SettingsError: There are goals, and `args` have none.
        """
        limits = self._limits
        if tuning.goals is not None and limits.goals is None:
            raise SettingsError(
                "user_config.batcher.goals: the engine was started without batcher.goals in args; add them "
                "there, which restarts it"
            )
        self.batcher.set_capacity(
            tuning.capacity_tokens or limits.capacity, max_running=tuning.max_running or limits.max_running
        )
        self.batcher.set_queue_size(tuning.max_queue_size or limits.max_queue_size)
        if limits.goals is not None:
            self.batcher.set_goals(Goals(**tuning.goals.model_dump()) if tuning.goals else limits.goals)
        self.batcher.set_tenant_weights(
            limits.tenant_weights if tuning.tenant_weights is None else tuning.tenant_weights
        )

    def grammar_vocabulary(self) -> str:
        """Return the vocabulary that grammars are compiled for, as a `GrammarCheck` wants it; empty: none."""
        if self.llm.model_config.runner_type == "pooling":
            return ""
        try:
            backend = XgrammarBackend(
                self.llm.vllm_config, self._tokenizer, self.llm.model_config.get_vocab_size()
            )
            return str(backend.compiler.compile_regex("a").tokenizer_info.serialize_json())
        except Exception:
            # vLLM answers no request with a grammar either.
            logger.exception("grammars are not checked for the time that they take to compile")
            return ""

    def check_grammars(self, check: GrammarCheck) -> None:
        """Have each grammar that the engine compiles checked before, if it compiles them with xgrammar.

        An engine compiles all grammars with the backend of its first one: with "auto" that is xgrammar's, by
        the warm-up. The other backends refuse a wrong grammar by themselves, when they validate it.
        """
        if self.llm.vllm_config.structured_outputs_config.backend in ("auto", "xgrammar"):
            self.llm.grammars = check

    async def start(self) -> tuple[ASGIApp, set[str]]:
        """Warm the engine up, start the batcher; return vLLM's application and the routes that it serves."""
        await self.adapters.start()
        # A task of its own: the part of the warm-up is not to be that of tasks that are started here.
        await asyncio.create_task(self._warm_up())
        await self.batcher.start()
        await self._texts.start()
        app, routes = await build_application(self.llm, self._args, self._texts)
        self.describe = cache(partial(describe_application, app, routes))
        self.prompts = Prompts(self._tokenizer, app.state.online_renderer, self._texts, self.max_model_len)
        # vLLM asks the environment for its settings several times per request.
        enable_envs_cache()
        hide_refusals()
        return cast(ASGIApp, app), routes

    async def _warm_up(self) -> None:
        call = self._book.open(Origin(source="warm_up"))
        part = call.part()
        set_part(part)
        try:
            await warm_up(self.llm)
        finally:
            part.end()
            call.close()

    def report_metrics(self) -> None:
        """Report vLLM's counters since the last call."""
        for each in self.llm.logger_manager.stat_loggers if self.llm.logger_manager else ():
            if isinstance(each, EngineMetrics):
                each.flush()

    async def check_health(self) -> None:
        """Raise if the engine has died."""
        await self.llm.check_health()

    async def stop(self, timeout_s: float) -> None:
        """Finish the admitted requests, for `timeout_s` at most, then end vLLM's processes."""
        try:
            await self.batcher.stop(timeout=timeout_s)
        finally:
            await self._texts.stop()
            self.llm.shutdown()
            await self.adapters.close()
