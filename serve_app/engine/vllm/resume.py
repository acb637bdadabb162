"""Streams of vLLM that go on in another engine."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.engine.vllm.seams import IncrementalDetokenizer
from serve_app.wire.frame import ResumeMode

GREEDY = 1e-5
"""Below this temperature vLLM draws nothing and takes the likeliest token."""


def resume_mode(prompt: Any, params: SamplingParams) -> ResumeMode:
    """Return how a stream could go on in another engine.

    A text drawn without a seed goes on with other draws, as likely as its own would have been. One drawn with
    a seed can only be drawn again from its start: the state of its generator isn't known.
    """
    if params.n != 1:
        return ""
    greedy = params.temperature < GREEDY
    stateless = (
        isinstance(prompt, dict)
        and prompt.get("type") == "token"
        and params.logprobs is None
        and params.prompt_logprobs is None
        and params.structured_outputs is None
        and params.thinking_token_budget is None
        and params.repetition_detection is None
        # These depend on what was generated, which becomes part of the prompt.
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.bad_words
    )
    if stateless and (greedy or params.seed is None):
        return "tokens"
    return "again" if greedy or params.seed is not None else ""


async def go_on(
    llm: AsyncLLM,
    generate: Callable[..., AsyncGenerator[RequestOutput, None]],
    prompt: Any,
    params: SamplingParams,
    request_id: str,
    token_ids: list[int],
    **options: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """Generate what follows `token_ids`, and yield it as though these came with the first token.

    Args:
        llm: vLLM's engine client.
        generate: Its own `generate`.
        prompt: The rendered prompt.
        params: Its sampling, as the client asks for it.
        request_id: Id of the request.
        token_ids: The tokens that another engine has generated.
        options: The other arguments of `generate`.
    """
    rest = params.clone()
    processor = llm.input_processor
    rest.update_from_generation_config(
        processor.generation_config_fields, processor.renderer.get_eos_token_id()
    )
    if (
        params.stop
        or len(token_ids) >= (params.max_tokens or llm.model_config.max_model_len)
        or (token_ids[-1] in rest.all_stop_token_ids and not params.ignore_eos)
    ):
        # It may have been the last: then it ends again where it ended.
        token_ids = token_ids[:-1]
    prompt_ids = prompt["prompt_token_ids"]
    detokenizer = IncrementalDetokenizer.from_new_request(
        llm.get_tokenizer(),
        SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=prompt_ids,
            prompt_embeds=None,
            sampling_params=params,
        ),
    )
    detokenizer.update(token_ids, False)
    if rest.max_tokens is not None:
        rest.max_tokens -= len(token_ids)
    rest.min_tokens = max(0, params.min_tokens - len(token_ids))
    # The text is that of all tokens, and so is what stops it.
    rest.detokenize = False
    rest.stop = []
    rest.output_text_buffer_length = 0
    longer = {**prompt, "prompt_token_ids": prompt_ids + token_ids}
    results = generate(longer, rest, request_id, **options)
    async with aclosing(results):
        async for result in results:
            (output,) = result.outputs
            known = detokenizer.num_output_tokens()
            stop = detokenizer.update(output.token_ids, output.finish_reason == "stop")
            if stop is not None:
                output.finish_reason, output.stop_reason, result.finished = "stop", stop, True
            output.text = detokenizer.get_next_output_text(output.finish_reason is not None, True)
            # Without those behind a stop string.
            output.token_ids = [*token_ids, *detokenizer.output_token_ids[known:]]
            token_ids = []
            result.prompt_token_ids = prompt_ids
            yield result
            if stop is not None:
                return
