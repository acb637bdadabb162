"""vLLM's renderer with a `TokenizingQueue` in front of its tokenizer, and a bound on what it tokenizes.

The imports are those of vLLM 0.32.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from vllm.exceptions import VLLMValidationError
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template

from serve_app.api.errors import RequestError
from serve_app.engine.admission import current
from serve_app.engine.tokenizing import TokenizingQueue, is_short
from serve_app.engine.vllm.refusal import RefusedError

PIECE_CHARS = 65_536
"""A longer text is counted in pieces of this size first.

The tokens of a long text are freed at once, with the interpreter's lock held: those of 4 MiB take a second.
"""

CUT_TOKENS = 16
"""Tokens by which a piece may have more than its part of the text, as words are cut."""

T = TypeVar("T")


def bound_tokenizing(renderer: BaseRenderer[Any], queue: TokenizingQueue, most: int) -> None:
    """Make a renderer tokenize through a queue.

    vLLM refuses texts for the engine that are longer than the context could be. `/tokenize` and `/detokenize`
    have no bound of vLLM's.

    Args:
        renderer: Renders the prompts of all routes.
        queue: Admits texts.
        most: Most tokens of a text of `/tokenize`, and of a list of `/detokenize`.
    """
    tokenize, decode = renderer._tokenize_prompt, renderer._decode

    async def queued(call: Callable[[], T], characters: int) -> T:
        try:
            return await queue.run(call, characters)
        except RequestError as error:
            raise RefusedError(error) from None

    async def tokenize_prompt(prompt: TextPrompt, params: TokenizeParams) -> TokensPrompt:
        tokenizer = renderer.get_tokenizer()
        counts = params.max_total_tokens is None
        if counts:
            if len(prompt["prompt"]) > most * tokenizer.max_chars_per_token:
                raise _too_long(f"the text has {len(prompt['prompt'])} characters", most)
            params = replace(params, max_total_tokens=most)
        elif params.truncate_prompt_tokens is not None and params.truncation_side is None:
            # With a side vLLM cuts a text of any length before it is tokenized.
            sided = replace(params, truncation_side=tokenizer.truncation_side)
            prompt = sided.apply_pre_tokenization(tokenizer, prompt)
        text, limit = prompt["prompt"], params.max_total_tokens
        whole = params.truncate_prompt_tokens is None and limit is not None

        def call() -> Any:
            if whole and len(text) > PIECE_CHARS and exceeds(tokenizer, text, limit):
                if counts:
                    raise _too_long(f"the text has more than {limit} tokens", limit)
                message = f"This model's context has {limit} tokens, and the prompt has more; shorten it."
                raise VLLMValidationError(message)
            return tokenize(prompt, params)

        tokens: TokensPrompt = await queued(call, len(text))
        if counts and len(tokens["prompt_token_ids"]) > most:
            raise _too_long(f"the text has more than {most} tokens", most)
        return tokens

    async def decode_tokens(token_ids: list[int]) -> str:
        if len(token_ids) > most:
            raise _too_long(f"tokens: the list has {len(token_ids)} token ids", most)
        text: str = await queued(partial(decode, token_ids), len(token_ids))
        return text

    replaced: Any = renderer
    asynchronous: dict[str, Callable[..., Awaitable[Any]]] = {
        "_tokenize_prompt_async": tokenize_prompt,
        "_async_tokenizer_decode": decode_tokens,
    }
    for name, function in asynchronous.items():
        if not hasattr(renderer, name):
            raise RuntimeError(f"this vLLM's renderer has no {name}: it would tokenize past the queue")
        setattr(replaced, name, function)


def render_short_chats_at_once(renderer: BaseRenderer[Any]) -> None:
    """Make a renderer apply the chat template to a short request on the event loop, not in a thread.

    Not for templates that come with a request: vLLM limits their time, which takes a thread.

    Args:
        renderer: Renders the prompts of all routes. One that isn't Hugging Face's stays as it is.
    """
    if not isinstance(renderer, HfRenderer):
        return
    in_thread = renderer._apply_chat_template_async

    async def apply(*args: Any, **options: Any) -> Any:
        if is_short(current().request):
            return safe_apply_chat_template(*args, **options)
        return await in_thread(*args, **options)

    renderer._apply_chat_template_async = apply


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


def _too_long(reason: str, most: int) -> VLLMValidationError:
    return VLLMValidationError(f"{reason}; at most {most} tokens are taken here (max_tokenize_tokens)")
