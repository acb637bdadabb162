"""Pooling models of vLLM: the routes that they serve, and their texts in the queue of the tokenizer.

The imports are those of vLLM 0.32.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
from vllm.entrypoints.pooling.typing import PoolingEngineInput
from vllm.exceptions import VLLMValidationError
from vllm.renderers import chat_utils

from serve_app.api.errors import RequestError
from serve_app.api.routes import CLASSIFY, EMBEDDINGS, GENERATE, SCORE
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm.refusal import RefusedError
from serve_app.engine.vllm.tokenizing import PIECE_CHARS, exceeds

SERVED_BY = {
    "serving_embedding": (EMBEDDINGS,),
    "serving_classification": CLASSIFY,
    "serving_scores": SCORE,
}
"""Parts of vLLM's application, and the routes that have no use without them."""

T = TypeVar("T")


def served_routes(app: FastAPI, tasks: Collection[str]) -> set[str]:
    """Return the routes that a model serves, as vLLM names them, with `/generate` where it generates.

    vLLM's application has some that answer 501.

    Args:
        app: Its application, whose state is set.
        tasks: The tasks of the engine.
    """
    routes = {getattr(route, "path", "") for route in app.router.routes} - {GENERATE}
    for part, paths in SERVED_BY.items():
        if getattr(app.state, part, None) is None:
            routes -= set(paths)
    return routes | {GENERATE} if "generate" in tasks else routes


def bound_rendering(state: Any, queue: TokenizingQueue, most: int) -> None:
    """Make the pooling routes of vLLM's application tokenize through a queue, as the others do.

    vLLM tokenizes their texts in threads of its own, past what it replaces for other routes, and those to
    score in part on the event loop and without a bound on their length.

    Args:
        state: The state of the application.
        queue: Admits texts.
        most: Tokens of the context.

    Raises:
        RuntimeError: This version of vLLM renders its prompts elsewhere.
    """
    for part in SERVED_BY:
        if (serving := getattr(state, part, None)) is None:
            continue
        processor = serving.io_processor
        if not hasattr(processor, "render_async") or not hasattr(serving, "_preprocessing"):
            raise RuntimeError(f"this vLLM's {part} has no render_async: it would tokenize past the queue")
        processor.render_async = partial(_render, processor, queue)
        if part == "serving_scores":
            serving._preprocessing = partial(_prepare, queue, most)


async def _render(processor: Any, queue: TokenizingQueue, params: Any) -> Any:
    """Do as the processor's own `render`, with the tokenizer behind a queue."""
    renderer = processor.renderer
    options = {name: params[name] for name in ("tok_params", "prompt_extras", "skip_mm_cache")}
    if "conversations" in params:
        chats = [params["conversations"]]
        _, (prompt,) = await renderer.render_chat_async(chats, params["chat_params"], **options)
    elif "prompts" in params:
        (prompt,) = await renderer.render_cmpl_async([params["prompts"]], **options)
    else:
        pair = [_text(part) for side in ("data_1", "data_2") for part in _parts(params[side])]
        return await _queued(queue, partial(_render_pair, processor, params, pair), sum(map(len, pair)))
    return PoolingEngineInput(
        prompts=prompt,
        params=params["params"],
        lora_requests=params["lora_requests"],
        priorities=params["priorities"],
    )


def _render_pair(processor: Any, params: Any, pair: list[str]) -> Any:
    tokens = params["tok_params"]
    limit = tokens.max_total_tokens
    cut = params["max_tokens_per_query"] or params["max_tokens_per_doc"]
    if limit is not None and tokens.truncate_prompt_tokens is None and not cut:
        for text in pair:
            if len(text) > PIECE_CHARS and exceeds(processor.renderer.get_tokenizer(), text, limit):
                raise VLLMValidationError(
                    f"This model's context has {limit} tokens, and a text has more; shorten it."
                )
    return processor.render(params)


async def _prepare(queue: TokenizingQueue, most: int, processor: Any, ctx: Any) -> None:
    """Do as `ServingScores._preprocessing`, off the event loop where it cuts texts by their tokens."""
    request = ctx.request
    fields = ("query", "documents") if isinstance(request, RerankRequest) else ("data_1", "data_2")
    characters = 0
    longest = most * processor.renderer.get_tokenizer().max_chars_per_token
    for field in fields:
        for part in _parts(getattr(request, field)):
            if not isinstance(part, str):
                # vLLM refuses it too where the model takes text only, without the name of the part.
                chat_utils._parse_chat_message_content_mm_part(part)
            text = _text(part)
            characters += len(text)
            if len(text) > longest:
                raise VLLMValidationError(
                    f"a text has {len(text)} characters, and {most} tokens, this model's context, have "
                    f"{longest} at most; shorten it"
                )
    pairs = await _queued(queue, partial(processor.get_request_factory_online, ctx), characters)
    rendering = [asyncio.ensure_future(processor.render_async(pair)) for pair in pairs]
    try:
        ctx.engine_inputs = await asyncio.gather(*rendering)
    finally:
        for each in rendering:
            each.cancel()


def _parts(data: Any) -> Iterator[Any]:
    """Yield the texts and parts of a side of pairs, which is a text, a content, or a list of such."""
    if isinstance(data, list):
        for each in data:
            yield from _parts(each)
    elif isinstance(data, dict) and "content" in data:
        yield from _parts(data["content"])
    else:
        yield data


def _text(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text") or "")


async def _queued(queue: TokenizingQueue, call: Callable[[], T], characters: int) -> T:
    try:
        return await queue.run(call, characters)
    except RequestError as error:
        raise RefusedError(error) from None
