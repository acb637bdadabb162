"""Corrections of vLLM: each is a function; `seams` has the issue of each, and the version that mends it.

`tests/serve_app/engine/vllm/test_workarounds.py` has a test for each workaround that fails once vLLM
doesn't need it any more.

Imports of vLLM stand inside the functions: a process of vLLM calls some of them while vLLM imports itself.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from serve_app.engine.vllm import seams

SHORT_CHARS = 2_048
"""Maximum characters of a text that is tokenized on the event loop: half a millisecond.

A thread takes nearly as long to begin, and 5 ms longer where the event loop has the interpreter's lock.
"""

PIECE_CHARS = 65_536
"""A longer text is counted in pieces of this size first, in a thread of its own.

The tokens of a long text are freed at once, with the interpreter's lock held: 4 MiB of text take a second.
"""

CUT_TOKENS = 16
"""Tokens by which a piece may have more than its part of the text, as words are cut."""

MESSAGE_CHARS = 32
"""Characters that a chat template adds to a message, about."""


# Processes of the engine; see `serve_app.engine.vllm.plugin`.


def allow_amx() -> None:
    """Ask Linux for AMX, the matrix instructions of Intel's CPUs; without effect where the CPU has none.

    Linux ends a process that uses AMX without having asked (signal SIGILL). PyTorch asks before its first
    matrix product of the size that gains from AMX, vLLM's attention never asks: an engine whose first
    prompt is short, with a small bfloat16 model, dies of it (the fault of ggml-org/llama.cpp#26954).
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def zero_new_blocks() -> None:
    """Zero each block of the KV cache when a request gets it.

    A request whose arithmetic isn't finite leaves NaN in its blocks. The next owner of a block writes its own
    values, but an attention reads the whole block: zero times NaN is NaN. vLLM zeroes blocks where layers of
    another kind need it (vllm#35219), and asks one property in each place.
    """
    from serve_app.engine.vllm.seams import KVCacheConfig

    if not isinstance(vars(KVCacheConfig)["needs_kv_cache_zeroing"], property):
        raise RuntimeError("KVCacheConfig.needs_kv_cache_zeroing is not a property in this vLLM")
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


def keep_lora_rows_apart() -> None:
    """Keep requests without an adapter without one, on a CPU.

    vLLM marks their rows with the index -1. Its operations for a CPU look the adapter up with it, which finds
    the last one: the base model would answer with it. Zeros from the first operation of a layer don't help
    where the second operation multiplies them with NaN or infinity.
    """
    from vllm.platforms import current_platform

    if seams.ended("lora_ops") or not current_platform.is_cpu():
        return
    lora_ops, punica_cpu = seams.lora_ops, seams.punica_cpu

    # Prompts come by way of `sgmv_shrink`, which calls the function of `lora_ops`; the tokens behind them
    # don't.
    shrink = lora_ops.bgmv_shrink

    def shrink_apart(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[: len(indices)][indices < 0] = 0

    def apart(expand: Callable[..., None]) -> Callable[..., None]:
        def expand_apart(
            inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **more: Any
        ) -> None:
            without = indices < 0
            if not without.any():
                expand(inputs, weights, output, indices, *args, **more)
            elif not without.all():
                kept = output[without].clone()
                expand(inputs, weights, output, indices, *args, **more)
                output[without] = kept

        return expand_apart

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_apart
    for name in ("bgmv_expand", "bgmv_expand_slice"):
        expand = apart(getattr(lora_ops, name))
        setattr(lora_ops, name, expand)
        setattr(punica_cpu, name, expand)


# Texts.


def bound_tokenizing(renderer: Any, most: int) -> None:
    """Refuse a text that is too long to tokenize, without holding the interpreter's lock for seconds.

    A text that is too long for `/tokenize`, or has more tokens than the context, is counted in pieces. A
    short text is tokenized on the event loop, a long text in a thread of its own, behind which no other text
    waits. No bound on bytes at the door does this: a token has between one and a hundred characters.

    Args:
        renderer: vLLM's renderer, of the prompts of all routes.
        most: Maximum tokens of a text of `/tokenize`.
    """
    from vllm.exceptions import VLLMValidationError

    tokenize, tokenize_in_thread = renderer._tokenize_prompt, renderer._tokenize_prompt_async
    long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")

    def too_long(reason: str) -> VLLMValidationError:
        return VLLMValidationError(f"{reason}; at most {most} tokens are taken here (max_tokenize_tokens)")

    # Pooling models tokenize here too, in threads of vLLM's.
    def tokenize_counted(prompt: Any, params: Any) -> Any:
        text, limit = prompt["prompt"], params.max_total_tokens
        whole = params.truncate_prompt_tokens is None and limit is not None
        if whole and len(text) > PIECE_CHARS and exceeds(renderer.get_tokenizer(), text, limit):
            raise VLLMValidationError(f"{context_of(limit)}, and the prompt has more; shorten it.")
        return tokenize(prompt, params)

    async def tokenize_prompt(prompt: Any, params: Any) -> Any:
        tokenizer = renderer.get_tokenizer()
        counts = params.max_total_tokens is None
        if counts:
            if len(prompt["prompt"]) > most * tokenizer.max_chars_per_token:
                raise too_long(f"the text has {len(prompt['prompt'])} characters")
            params = replace(params, max_total_tokens=most)
        elif params.truncate_prompt_tokens is not None and params.truncation_side is None:
            # With a side vLLM cuts a text of any length before it is tokenized.
            sided = replace(params, truncation_side=tokenizer.truncation_side)
            prompt = sided.apply_pre_tokenization(tokenizer, prompt)
        characters = len(prompt["prompt"])
        if characters <= SHORT_CHARS:
            tokens = tokenize(prompt, params)
        elif characters <= PIECE_CHARS:
            tokens = await tokenize_in_thread(prompt, params)
        else:
            call = functools.partial(tokenize_counted, prompt, params)
            try:
                tokens = await asyncio.get_running_loop().run_in_executor(long, call)
            except VLLMValidationError:
                if counts:
                    raise too_long(f"the text has more than {most} tokens") from None
                raise
        if counts and len(tokens["prompt_token_ids"]) > most:
            raise too_long(f"the text has more than {most} tokens")
        return tokens

    renderer._tokenize_prompt = tokenize_counted
    renderer._tokenize_prompt_async = tokenize_prompt


def context_of(tokens: int) -> str:
    """Return the beginning of vLLM's own error about a prompt that is too long: clients know its words."""
    return f"This model's maximum context length is {tokens} tokens"


def exceeds(tokenizer: Any, text: str, most: int) -> bool:
    """Return whether a text has certainly more than `most` tokens.

    It is tokenized as far as the answer is open: until there are more, or the bytes that are left are fewer
    than the tokens that are left. A token has a byte at least, but for texts that a tokenizer makes longer.
    """
    left, bytes_left = most, len(text.encode(errors="replace"))
    for start in range(0, len(text), PIECE_CHARS):
        if bytes_left <= left:
            return False
        piece = text[start : start + PIECE_CHARS]
        left -= len(tokenizer(piece, add_special_tokens=False)["input_ids"]) - CUT_TOKENS
        bytes_left -= len(piece.encode(errors="replace"))
        if left < 0:
            return True
    return False


def short_chats_at_once(renderer: Any) -> None:
    """Apply the chat template to a short chat on the event loop, not in a thread.

    A thread takes as long to begin as a template for a short chat. Not for an engine that takes templates
    from requests: vLLM limits their time, which takes a thread.

    Args:
        renderer: vLLM's renderer. One that isn't Hugging Face's stays as it is.
    """
    from serve_app.engine.vllm.seams import HfRenderer, safe_apply_chat_template

    if not isinstance(renderer, HfRenderer):
        return
    in_thread = renderer._apply_chat_template_async

    async def apply(model_config: Any, tokenizer: Any, conversation: Any, **options: Any) -> Any:
        if _is_short(conversation) and not options.get("tools") and not options.get("documents"):
            return safe_apply_chat_template(model_config, tokenizer, conversation, **options)
        return await in_thread(model_config, tokenizer, conversation, **options)

    renderer._apply_chat_template_async = apply


def _is_short(conversation: list[Any]) -> bool:
    """Return whether a chat has messages of text alone, `SHORT_CHARS` together at most."""
    characters = MESSAGE_CHARS * len(conversation)
    for message in conversation if characters <= SHORT_CHARS else ():
        for name, value in message.items():
            if name == "content" and isinstance(value, list):
                characters += sum(len(part.get("text") or "") for part in value if isinstance(part, dict))
            elif isinstance(value, str):
                characters += len(value)
            elif value is not None:
                return False
    return characters <= SHORT_CHARS


def score_beside_the_loop(state: Any, most: int) -> None:
    """Prepare the texts to score in a thread, with a bound on their length.

    vLLM cuts them by their tokens (`max_tokens_per_doc`) and parses them on the event loop, without a bound.

    Args:
        state: The state of vLLM's application.
        most: Tokens of the context.
    """
    if (serving := getattr(state, "serving_scores", None)) is None:
        return
    from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
    from vllm.exceptions import VLLMValidationError

    def prepare(processor: Any, ctx: Any) -> Any:
        request = ctx.request
        tokenizer = processor.renderer.get_tokenizer()
        longest = most * tokenizer.max_chars_per_token
        cut = request.max_tokens_per_query or request.max_tokens_per_doc or request.truncate_prompt_tokens
        for field in ("query", "documents") if isinstance(request, RerankRequest) else ("data_1", "data_2"):
            for part in _parts(getattr(request, field)):
                text = part if isinstance(part, str) else str(part.get("text") or "")
                if len(text) > longest:
                    raise VLLMValidationError(
                        f"a text has {len(text)} characters, and {most} tokens, this model's context, have "
                        f"{longest} at most; shorten it"
                    )
                if not cut and len(text) > PIECE_CHARS and exceeds(tokenizer, text, most):
                    raise VLLMValidationError(f"{context_of(most)}, and a text has more; shorten it.")
        return processor.get_request_factory_online(ctx)

    # A thread that finds no free tokenizer copies one.
    threads = ThreadPoolExecutor(2, thread_name_prefix="score")

    async def preprocessing(processor: Any, ctx: Any) -> None:
        requests = await asyncio.get_running_loop().run_in_executor(threads, prepare, processor, ctx)
        if not requests:
            raise VLLMValidationError("You must pass at least one prompt")
        ctx.engine_inputs = await asyncio.gather(*map(processor.render_async, requests))

    serving._preprocessing = preprocessing


def _parts(data: Any) -> Iterator[Any]:
    """Yield the texts and parts of a side of pairs, which is a text, a content, or a list of such."""
    if isinstance(data, list):
        for each in data:
            yield from _parts(each)
    elif isinstance(data, dict) and "content" in data:
        yield from _parts(data["content"])
    else:
        yield data


# The application.


def run_beam_searches(state: Any, run: Callable[..., Any]) -> None:
    """Run the beam searches of vLLM's application through another function.

    vLLM's search asks the engine once for each token of each beam: the admission of each would wait for the
    other requests.

    Args:
        state: The state of vLLM's application.
        run: Gets vLLM's own search first, and then its arguments.
    """
    from serve_app.engine.vllm.seams import BeamSearchOnlineMixin

    for part in state._state.values():
        if isinstance(part, BeamSearchOnlineMixin):
            part.beam_search = functools.partial(run, part.beam_search)


def validate_no_grammars() -> None:
    """Have vLLM validate no grammar in this process: the process of `serve_app.engine.grammars` has done it.

    vLLM parses a grammar on the event loop of its server up to three times, without a limit of time. A
    structural tag keeps the check of its shape, on which vLLM's parsers of tools rely.
    """
    from vllm.exceptions import VLLMValidationError

    from serve_app.engine.vllm.seams import (
        backend_guidance,
        backend_lm_format_enforcer,
        backend_outlines,
        backend_xgrammar,
        structured_outputs_to_format,
    )

    def validate(sampling_params: Any) -> None:
        outputs = sampling_params.structured_outputs
        if outputs.choice:
            # So does vLLM: xgrammar has no choices.
            outputs.grammar, outputs.choice = backend_xgrammar.choice_as_grammar(outputs.choice), None
        elif outputs.structural_tag:
            try:
                structured_outputs_to_format(outputs)
            except (ValueError, KeyError, TypeError) as error:
                raise VLLMValidationError("Invalid structural tag specification.") from error

    for module, name, own in (
        (backend_xgrammar, "validate_xgrammar_grammar", validate),
        (backend_guidance, "validate_guidance_grammar", lambda *_, **__: None),
        (backend_outlines, "validate_structured_output_request_outlines", lambda *_: None),
        (
            backend_lm_format_enforcer,
            "validate_structured_output_request_lm_format_enforcer",
            lambda *_: None,
        ),
    ):
        setattr(module, name, own)
