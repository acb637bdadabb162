"""The prompts of `/generate` as token ids.

The imports are those of vLLM 0.32.
"""

import asyncio
from functools import partial
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm.refusal import RefusedError, is_fault


class Prompts:
    """Turns texts and chats into prompts.

    Args:
        tokenizer: The model's tokenizer.
        renderer: What renders the chats of vLLM's application.
        texts: Admits texts.
        max_model_len: Tokens of the context.
    """

    def __init__(self, tokenizer: Any, renderer: Any, texts: TokenizingQueue, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._texts = texts
        self._max_model_len = max_model_len

    async def tokenize(self, prompts: list[str]) -> list[list[int] | RequestError]:
        """Return the token ids of each prompt, with the model's special tokens, or its error.

        Raises:
            RequestError: Too many texts wait, or the request's time is over.
        """
        return await self._texts.run(partial(self._encode, prompts), sum(map(len, prompts)))

    def _encode(self, prompts: list[str]) -> list[list[int] | RequestError]:
        errors = list(map(self._error, prompts))
        texts = [prompt for prompt, error in zip(prompts, errors, strict=True) if error is None]
        ids = iter(self._tokenizer(texts).input_ids if texts else ())
        return [next(ids) if error is None else error for error in errors]

    def _error(self, prompt: str) -> RequestError | None:
        """Return why a prompt can't be tokenized; None: it can."""
        # The tokens of a text take hundreds of times its memory: a text that can't fit isn't tokenized.
        if len(prompt) > self._max_model_len * self._tokenizer.max_chars_per_token:
            message = (
                f"the prompt has {len(prompt)} characters; this model takes {self._max_model_len - 1} tokens"
            )
            return RequestError(400, "invalid_request_error", message)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            # A tokenizer would refuse it together with all others.
            message = f"the prompt is no text: {error.reason} at character {error.start}"
            return RequestError(400, "invalid_request_error", message)
        return None

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
        except RefusedError:
            raise
        except Exception as error:
            # The chat's fault has its reason in the answer; the service's goes on, to where it is logged.
            if is_fault(error):
                raise
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
