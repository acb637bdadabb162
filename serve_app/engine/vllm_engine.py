"""A vLLM engine behind a token batcher.

Only files named vllm_* import vllm. The imports are those of vLLM 0.32; they move between minor versions.
"""

import asyncio
import itertools
import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fastapi import FastAPI
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.envs import enable_envs_cache
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from batcher import ContinuousBatcher, Goals
from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON, SamplingFields
from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.lora_options import lora_options
from serve_app.engine.stream_interval import PieceRate
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm_adapters import Adapters
from serve_app.engine.vllm_gated import GatedLLM
from serve_app.engine.vllm_media import refuse_media, use_allowed_hosts
from serve_app.engine.vllm_metrics import EngineMetrics
from serve_app.engine.vllm_options import batcher_of, limits_of, vllm_args
from serve_app.engine.vllm_pooling import bound_rendering, served_routes
from serve_app.engine.vllm_refusal import RefusedError, hide_refusals
from serve_app.engine.vllm_sleep import VLLMSleeper
from serve_app.engine.vllm_tokenizing import bound_tokenizing
from serve_app.engine.vllm_usage import EngineCounters, count_sequences, set_part
from serve_app.engine.vllm_validation import end_at_first_error
from serve_app.engine.vllm_warm_up import compile_nothing_on_a_cpu, warm_up
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.turns import ShareSettings
from serve_app.settings.user_config import BatcherUserConfig
from serve_app.usage.calls import CallBook, Origin

HOT = {"/v1/chat/completions", "/v1/completions"}
"""The most frequent routes."""

UNUSED: tuple[object, ...] = (CORSMiddleware, PrometheusInstrumentatorMiddleware)
"""Middleware of vLLM's application whose work the Ingress does, once for all models."""

logger = logging.getLogger("ray.serve")

DEFAULT_MAX_TOKENS = 512
"""Output tokens of a `/generate` prompt where neither the request nor the config states them."""


class _Steps(StatLoggerBase):  # type: ignore[misc]
    """Measures the engine's steps for the batcher."""

    batcher: ContinuousBatcher | None = None

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._last = 0.0
        self._busy = False

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None or self.batcher is None:
            return
        now = time.monotonic()
        if self._busy:
            # Later: an error in a logger would end vLLM's client for good.
            asyncio.get_running_loop().call_soon(self.batcher.step, now - self._last)
        self._last = now
        self._busy = scheduler_stats.num_running_reqs > 0

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls it."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        params: vLLM's parameters.
        may_shorten: `max_tokens` is a default, which a long prompt may reduce.
    """

    params: SamplingParams
    may_shorten: bool


@dataclass(slots=True, frozen=True)
class Completion:
    """The completion of one prompt."""

    text: str
    finish_reason: str | None
    tokens: int


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

    Raises:
        SettingsError: vLLM has no such option.
    """

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
        engine_args = AsyncEngineArgs.from_cli_args(self._args)
        compile_nothing_on_a_cpu(engine_args)
        steps = _Steps()
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
        self.adapters = self.llm.adapters = Adapters(settings, self.llm, files, fetched)
        self._book = book
        count_sequences(self.llm, book)
        self.llm.piece_rate = PieceRate()
        self.llm.by_priority = self._args.scheduling_policy == "priority"
        self.llm.max_prompt_logprobs = settings.max_prompt_logprobs
        self._limits = limits_of(settings.batcher, self.llm)
        self.batcher = self.llm.batcher = steps.batcher = batcher_of(settings.batcher, self._limits)
        self.max_model_len: int = self.llm.model_config.max_model_len
        self._sampling: JSON = (
            {"max_tokens": DEFAULT_MAX_TOKENS}
            | self.llm.model_config.get_diff_sampling_param()
            | settings.sampling.sampling()
        )
        self._tokenizer = self.llm.get_tokenizer()
        # vLLM asks for it with every request, and its tokenizer looks it up each time: cached.
        eos_token_id = self.llm.renderer.get_eos_token_id()
        self.llm.renderer.get_eos_token_id = lambda: eos_token_id
        self.max_tokenize_tokens = settings.max_tokenize_tokens or self.max_model_len
        self._texts = TokenizingQueue(
            settings.batcher.max_queue_size,
            self.llm.model_config.renderer_num_workers,
            settings.batcher.tenant_weights,
        )
        bound_tokenizing(self.llm.renderer, self._texts, self.max_tokenize_tokens)
        self._ids = itertools.count()
        self.steps = 0
        self._count_steps()

    def _count_steps(self) -> None:
        """Count the outputs of the engine: with vLLM's statistics on, there is one after each step."""
        core = self.llm.engine_core
        get_output = core.get_output_async

        async def counted() -> Any:
            outputs = await get_output()
            self.steps += 1
            return outputs

        core.get_output_async = counted

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

    async def start(self) -> tuple[ASGIApp, set[str]]:
        """Warm the engine up, start the batcher; return vLLM's application and the routes that it serves."""
        await self.adapters.start()
        # A task of its own: the part of the warm-up is not to be that of tasks that are started here.
        await asyncio.create_task(self._warm_up())
        await self.batcher.start()
        await self._texts.start()
        tasks = await self.llm.get_supported_tasks()
        app = build_app(self._args, tasks, self.llm.model_config)
        # vLLM gives its own errors OpenAI's shape, but not those of the router: no such path or method.
        app.exception_handler(HTTPException)(http_exception_handler)
        end_at_first_error(app)
        _drop_unused(app)
        app.middleware_stack = app.build_middleware_stack()
        await init_app_state(self.llm, app.state, self._args, tasks)
        for part in vars(app.state)["_state"].values():
            if isinstance(part, BeamSearchOnlineMixin):
                part.beam_search = partial(self.llm.beam_search, part.beam_search)
        bound_rendering(app.state, self._texts, self.max_model_len)
        self._renderer = app.state.online_renderer
        # vLLM looks up there what a request names.
        app.state.openai_serving_models.lora_requests = self.adapters.requests
        # vLLM asks the environment for its settings several times per request.
        enable_envs_cache()
        hide_refusals()
        return cast(ASGIApp, app), served_routes(app, tasks)

    async def _warm_up(self) -> None:
        call = self._book.open(Origin(source="warm_up"))
        part = call.part()
        set_part(part)
        try:
            await warm_up(self.llm)
        finally:
            part.end()
            call.close()

    async def tokenize(self, prompts: list[str]) -> list[list[int] | RequestError]:
        """Return the token ids of each prompt, with the model's special tokens, or its error.

        Raises:
            RequestError: Too many texts wait, or the request's time is over.
        """
        return await self._texts.run(partial(self._encode, prompts), sum(map(len, prompts)))

    def _encode(self, prompts: list[str]) -> list[list[int] | RequestError]:
        # The tokens of a text take hundreds of times its memory: a text that can't fit isn't tokenized.
        most = self.max_model_len * self._tokenizer.max_chars_per_token
        short = [prompt for prompt in prompts if len(prompt) <= most]
        ids = iter(self._tokenizer(short).input_ids if short else ())
        return [next(ids) if len(prompt) <= most else self._too_long(prompt) for prompt in prompts]

    def _too_long(self, prompt: str) -> RequestError:
        message = f"the prompt has {len(prompt)} characters; this model takes {self.max_model_len - 1} tokens"
        return RequestError(400, "invalid_request_error", message)

    async def render(self, chats: list[list[JSON]]) -> list[list[int] | RequestError]:
        """Return the token ids of each chat, through the model's chat template, or its error.

        Raises:
            RequestError: Too many texts wait, or the request's time is over.
        """
        tasks = [asyncio.ensure_future(self._render(chat)) for chat in chats]
        try:
            return await asyncio.gather(*tasks)
        except RefusedError as error:
            raise error.error from None
        finally:
            for task in tasks:
                task.cancel()

    async def _render(self, messages: list[JSON]) -> list[int] | RequestError:
        try:
            # The same call as in vLLM's own chat route.
            rendered = await self._renderer.render_chat(ChatCompletionRequest(messages=messages))
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            return RequestError(400, "invalid_request_error", str(item["msg"]))
        except (VLLMClientError, ValueError, TypeError) as error:
            return RequestError(400, "invalid_request_error", str(error))
        if isinstance(rendered, ErrorResponse):
            return RequestError(400, "invalid_request_error", rendered.error.message)
        _, (prompt,) = rendered
        if prompt["type"] != "token":
            return RequestError(
                400, "invalid_request_error", "only text can be sent here, not images or sound"
            )
        ids: list[int] = prompt["prompt_token_ids"]
        return ids

    def sampling(self, fields: SamplingFields) -> Sampling:
        """Return sampling parameters: `fields`, then the config's, then the model's own defaults.

        Raises:
            RequestError: 400, in vLLM's words.
        """
        given = fields.sampling()
        try:
            params = SamplingParams(**(self._sampling | given), output_kind=RequestOutputKind.FINAL_ONLY)
        except (VLLMValidationError, ValueError, TypeError) as error:
            raise RequestError(400, "invalid_request_error", str(error)) from None
        return Sampling(params, may_shorten="max_tokens" not in given)

    async def complete(self, token_ids: list[int], sampling: Sampling, adapter: str = "") -> Completion:
        """Generate one completion.

        Args:
            token_ids: The prompt.
            sampling: Its sampling.
            adapter: Id of the adapter; empty: none.

        Raises:
            RequestError: The prompt doesn't fit, the batcher refused it, or the engine failed.
        """
        params = self._fit(len(token_ids), sampling)
        request_id = f"generate-{next(self._ids)}"
        options: dict[str, Any] = {}
        if adapter:
            if adapter not in self.adapters:
                # It was removed while the prompt was tokenized.
                raise self.adapters.missing(adapter)
            options["lora_request"] = self.adapters.requests[adapter]
        try:
            # There is one result, the last; reading on ends the generator and frees its slot.
            output = None
            async for result in self.llm.generate(tokens_input(token_ids), params, request_id, **options):
                output = result.outputs[0]
        except RefusedError as error:
            raise error.error from None
        except VLLMClientError as error:
            raise RequestError(400, "invalid_request_error", str(error)) from None
        except (EngineDeadError, EngineGenerateError) as error:
            raise RequestError(503, "service_unavailable", f"The engine failed: {error}") from error
        if output is None:
            raise RequestError(500, "internal_error", "The engine ended the request without a result.")
        return Completion(output.text, output.finish_reason, len(output.token_ids))

    def _fit(self, length: int, sampling: Sampling) -> SamplingParams:
        limit = self.max_model_len
        if length >= limit:
            message = f"the prompt has {length} tokens; this model takes {limit - 1} at most"
            raise RequestError(400, "invalid_request_error", message)
        if length == 0:
            raise RequestError(400, "invalid_request_error", "the prompt is empty")
        params = sampling.params
        if length + params.max_tokens <= limit:
            return params
        if sampling.may_shorten:
            shorter: SamplingParams = params.clone()
            shorter.max_tokens = limit - length
            return shorter
        message = (
            f"the prompt's {length} tokens and max_tokens={params.max_tokens} exceed this model's "
            f"context of {limit} tokens; lower max_tokens to {limit - length} or less"
        )
        raise RequestError(400, "invalid_request_error", message)

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


def _drop_unused(app: FastAPI) -> None:
    """Drop the middleware that has no use behind the relay, and put the most frequent routes first.

    The router tries one route after the other.
    """
    app.router.routes.sort(key=lambda route: getattr(route, "path", "") not in HOT)
    app.user_middleware = [each for each in app.user_middleware if each.cls not in UNUSED]
