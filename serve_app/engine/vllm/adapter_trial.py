"""A trial request with an adapter, before clients get it.

The imports are those of vLLM 0.32.
"""

import math
from typing import Any

import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.engine.adapter_files import AdapterError
from serve_app.engine.vllm.stats import own_work
from serve_app.engine.vllm.warm_up import POOLING
from serve_app.ledger.calls import CallBook

TEXT = (
    'What is 47+28? The quick brown fox jumps over the lazy dog: 3.14, (6*7) = 42; "Straße" & {x: [1, 2]} '
    "<a href='#'>@home</a> | 100% ~ $5_000 \\ ^ `ÀÉ漢字あ한`!\n"
)
"""The text of the trial: letters, digits and signs of many kinds."""

MOST_TOKENS = 64
"""Tokens of it, at most: the logits of each take memory of the device."""


async def try_adapter(llm: Any, request: LoRARequest, book: CallBook) -> None:
    """Answer a request with an adapter, and look at all numbers of the answer.

    It passes the batcher, as the warm-up does: it is short, and there is one at a time.

    Args:
        llm: vLLM's engine.
        request: The adapter, by a name that no other request has.
        book: Gets the work.

    Raises:
        AdapterError: A number isn't finite, or the engine takes no such request.
    """
    limit = max(1, min(MOST_TOKENS, llm.model_config.max_model_len - 2))
    prompt = tokens_input(llm.get_tokenizer().encode(TEXT)[:limit])
    try:
        tasks = await llm.get_supported_tasks()
        with own_work(book):
            if "generate" in tasks:
                finite = await _generates(llm, request, prompt)
            elif (task := llm.model_config.get_pooling_task(tasks)) in POOLING:
                finite = await _pools(llm, request, prompt, task)
            else:
                finite = True
    except (VLLMClientError, ValueError) as error:
        raise AdapterError(f"can't be tried, since the engine refuses the trial request: {error}") from None
    if not finite:
        raise AdapterError(
            "gives numbers that are not finite (NaN): a trial request with it failed. Its matrices or its "
            "lora_alpha are too large for the engine's numbers (engine.dtype), or it is for another model"
        )


async def _generates(llm: Any, request: LoRARequest, prompt: Any) -> bool:
    """Return whether the logprobs of a prompt and of an answer are numbers."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=2,
        ignore_eos=True,
        # With the best token of each place: NaN counts as the largest value.
        logprobs=1,
        prompt_logprobs=1,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    results = AsyncLLM.generate(
        llm, prompt, params, f"adapter-trial-{request.lora_int_id}", lora_request=request
    )
    places: list[Any] = []
    async for result in results:
        places = [*(result.prompt_logprobs or ()), *(result.outputs[0].logprobs or ())]
    found = [one.logprob for place in places if place for one in place.values()]
    return bool(found) and not any(map(math.isnan, found))


async def _pools(llm: Any, request: LoRARequest, prompt: Any, task: str) -> bool:
    """Return whether the vectors of a text are numbers."""
    params = PoolingParams(task=task)
    params.verify(llm.model_config)
    results = AsyncLLM.encode(
        llm, prompt, params, f"adapter-trial-{request.lora_int_id}", lora_request=request
    )
    finite = False
    async for result in results:
        finite = bool(torch.isfinite(result.outputs.data).all())
    return finite
