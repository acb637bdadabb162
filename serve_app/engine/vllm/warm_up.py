"""The warm-up of an engine: each way to use it is used once, so that no request waits for its kernels."""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

PROMPT = [1, 2, 3, 4]
"""Token ids that each vocabulary has."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "seeded": {"temperature": 1.0, "seed": 1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logit bias": {"logit_bias": {1: 1.0}, "min_tokens": 1},
    "logprobs": {"logprobs": 1},
    "logprobs of the prompt": {"prompt_logprobs": 1},
    "a grammar": {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])},
}
"""The ways to sample, as parameters."""

POOLING = {"embed", "classify", "token_embed", "token_classify"}
"""The tasks of pooling models that take a prompt alone."""

LONG_S = 2.0
"""Seconds from which on the log tells of the warm-up."""

logger = logging.getLogger("ray.serve")


def compile_nothing_on_a_cpu(args: AsyncEngineArgs) -> None:
    """Let `enforce_eager` hold for the sampler too, on a CPU.

    vLLM compiles parts of its sampler even so. That takes a CPU half a minute and saves it next to nothing.
    A `TORCH_COMPILE_DISABLE` of the environment is kept. On a GPU the kernels save memory.
    """
    if args.enforce_eager and current_platform.is_cpu():
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


async def warm_up(llm: AsyncLLM) -> None:
    """Sample in each way once, and then in all ways together.

    vLLM compiles some kernels when they are first used, for one sequence and once more for several, and
    makes its grammar backend for the first grammar. All requests of the engine wait meanwhile. A pooling
    model runs one prompt.

    Raises:
        EngineDeadError: The engine has died.
    """
    tasks = await llm.get_supported_tasks()
    began = time.monotonic()
    numbers = itertools.count()
    if "generate" not in tasks:
        if (task := llm.model_config.get_pooling_task(tasks)) in POOLING:
            await _pool(llm, task, numbers)
        return
    for kind in KINDS:
        await _sample(llm, kind, numbers)
    await asyncio.gather(*(_sample(llm, kind, numbers) for kind in (*KINDS, *KINDS)))
    if (took_s := time.monotonic() - began) > LONG_S:
        logger.info("the engine was warmed up in %.0f s", took_s)


async def _pool(llm: AsyncLLM, task: str, numbers: Iterator[int]) -> None:
    params = PoolingParams(task=task)
    try:
        params.verify(llm.model_config)
        # Past the batcher, which serves nobody yet.
        async for _ in AsyncLLM.encode(llm, tokens_input(PROMPT), params, f"warm-up-{next(numbers)}"):
            pass
    except (VLLMClientError, ValueError) as error:
        logger.warning("the warm-up of %s failed: %s", task, error)


async def _sample(llm: AsyncLLM, kind: str, numbers: Iterator[int]) -> None:
    fields = {"max_tokens": 2, "output_kind": RequestOutputKind.FINAL_ONLY} | KINDS[kind]
    try:
        # Past the batcher, which serves nobody yet.
        results = AsyncLLM.generate(
            llm, tokens_input(PROMPT), SamplingParams(**fields), f"warm-up-{next(numbers)}"
        )
        async for _ in results:
            pass
    except (VLLMClientError, ValueError) as error:
        # The model or its options exclude it, for clients too.
        logger.debug("no warm-up of %s: %s", kind, error)
