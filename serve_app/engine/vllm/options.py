"""vLLM's options and the batcher's limits, from the settings of a model."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.async_llm import AsyncLLM

from batcher import ContinuousBatcher, Lanes
from serve_app.api.scheduling import FLEX
from serve_app.engine.door import STARTING
from serve_app.engine.vllm.parser import OptionParser
from serve_app.engine.vllm.seams import validate_parsed_serve_args
from serve_app.settings.models import BatcherSettings, LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.simulation.options import engine_options

SCHEDULER = "serve_app.engine.vllm.scheduler.build_scheduler"

WATERMARK = 0.02
"""Share of the KV cache that stays free for running requests when another request begins: fewer rows are
preempted, for the same throughput."""

STEPS_WITHOUT_CACHE = 2
"""Steps of an engine without KV cache whose tokens may be in flight."""


NO_HOST = "none, since engine.allowed_media_domains is empty"
"""Stands for the hosts of media in vLLM's error where none is allowed; no URL has such a host."""


def vllm_args(settings: LLMSettings, defaults: Mapping[str, Any] | None = None) -> Any:
    """Return the namespace that `vllm serve` would parse from the same options.

    Args:
        settings: The model.
        defaults: Options where the config has none.

    Raises:
        SettingsError: vLLM has no such option, or refuses its value.
    """
    parser = OptionParser()
    args = parser.parse_args([])
    where = f"models[{settings.id}].engine"
    try:
        own = parser.values(settings.engine.options())
    except ValueError as error:
        raise SettingsError(f"{where}.{error}") from None
    options = {"scheduler_cls": SCHEDULER, **(defaults or {}), **own}
    if settings.simulate:
        options = engine_options(settings.simulate, **options)
    elif settings.share is not None:
        options = options | {"enable_sleep_mode": True}
    if not settings.multimodal:
        # vLLM keeps no memory for encoders of images and sound then.
        options = {"language_model_only": True} | options
    if settings.nodes > 1:
        from serve_app.engine.vllm.nodes import NodesExecutor

        options = options | {"distributed_executor_backend": NodesExecutor}
    for name, value in options.items():
        setattr(args, name, value)
    if settings.engine.scheduling_policy is None:
        # Live traffic first: the batcher starts it whatever requests of `flex` run.
        args.scheduling_policy = "priority"
        args.watermark = options.get("watermark", WATERMARK)
    if not args.allowed_media_domains:
        # vLLM would fetch from every host.
        args.allowed_media_domains = [NO_HOST]
    args.model = settings.path
    args.served_model_name = [settings.id]
    # The launcher of `vllm serve` does this; vLLM's application takes their parsers by name.
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {str(error).removeprefix('Error: ')}") from None
    return args


class BatcherLimits(NamedTuple):
    """Limits of admission, from the config or else from vLLM.

    Attributes:
        capacity: Tokens that may be in flight.
        max_running: Requests that may be in flight; None: no further limit.
        places: Sequences in one step of the engine.
        tenant_weights: Share of a tenant in relation to other tenants.
        max_queue_size: Requests that may wait.
        background: The priority from which on requests give way in vLLM; None: it runs them as they came.
    """

    capacity: int
    max_running: int | None
    places: int
    tenant_weights: Mapping[str, float]
    max_queue_size: int = 5_000
    background: int | None = None


def limits_of(settings: BatcherSettings, llm: AsyncLLM) -> BatcherLimits:
    """Return the limits of admission to a vLLM engine that has started."""
    cache = llm.vllm_config.cache_config
    if cache.num_gpu_blocks > 1:
        # vLLM keeps one block for itself.
        capacity = (cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size) - cache.block_size
    else:
        # An encoder has no KV cache: one step runs, and the next one waits in vLLM.
        step = max(llm.vllm_config.scheduler_config.max_num_batched_tokens, llm.model_config.max_model_len)
        capacity = STEPS_WITHOUT_CACHE * step
    return BatcherLimits(
        settings.capacity_tokens or max(capacity, cache.block_size),
        settings.max_running,
        llm.vllm_config.scheduler_config.max_num_seqs,
        settings.tenant_weights,
        settings.max_queue_size,
        FLEX if llm.vllm_config.scheduler_config.policy == "priority" else None,
    )


def text_batcher_of(settings: BatcherSettings, lanes: Lanes) -> ContinuousBatcher:
    """Return the batcher of jobs that run no model: they cost no KV cache, and few run at once."""
    return ContinuousBatcher(
        capacity=1,
        max_running=STARTING,
        max_queue_size=settings.max_queue_size,
        priority_aging_s=settings.priority_aging_s,
        tenant_weights=settings.tenant_weights,
        lanes=lanes,
    )


def batcher_of(
    settings: BatcherSettings,
    limits: BatcherLimits,
    lanes: Lanes | None,
    clock: Callable[[], float] = time.monotonic,
) -> ContinuousBatcher:
    """Return the batcher that admits jobs within `limits`, and as the `lanes` allow, on a clock."""
    return ContinuousBatcher(
        capacity=limits.capacity,
        max_running=limits.max_running,
        places=limits.places,
        max_queue_size=limits.max_queue_size,
        max_queue_cost=settings.max_queue_tokens,
        policy=settings.policy,
        oversize="alone",
        priority_aging_s=settings.priority_aging_s,
        tenant_weights=limits.tenant_weights,
        background=limits.background,
        lanes=lanes,
        max_starting=STARTING,
        clock=clock,
    )
