"""The work of `/generate`: a list of prompts, each admitted, tokenized and completed by itself.

The imports are valid for vLLM 0.32.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from batcher import BatcherError, Slot
from serve_app.api.errors import RequestError, internal_error
from serve_app.api.facts import MEDIA
from serve_app.api.protocol import (
    JSON,
    Detail,
    GenerateRequest,
    GenerateResponse,
    Usage,
)
from serve_app.api.validation import mistake
from serve_app.engine.batch_call import RECORDS_PER_TURN, BatchCall
from serve_app.engine.door import refusal_of
from serve_app.engine.job import Job, set_current
from serve_app.engine.openai import OF_REQUESTS
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.lora import Adapters

logger = logging.getLogger("ray.serve")

ONLY_TEXT = "only text can be sent here, not images or sound"

SHORT_CHARS = 2_048
"""Texts up to this length together are tokenized on the event loop: a thread takes as long to begin."""

AHEAD = 32
"""Maximum texts that are tokenized together with the text whose turn it is."""

BYTES_PER_CHAR = 4
"""Maximum bytes of a character in UTF-8."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        params: vLLM's parameters.
        may_shorten: `max_tokens` is a default, which a long prompt may reduce.
        salt: Salt of the prefix cache.
    """

    params: SamplingParams
    may_shorten: bool
    salt: str | None


class Texts:
    """The texts of a call, tokenized when their turn comes.

    A call of the tokenizer takes longer than a short text, so a few short texts behind it are tokenized too.

    Args:
        tokenizer: The tokenizer.
        texts: The texts.
        context: Context of the model, in tokens.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], context: int) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._context = context
        self._next = 0
        self._ahead: dict[int, list[int]] = {}

    async def tokenize(self, index: int) -> list[int]:
        """Return the token ids of a text, with the model's special tokens.

        Raises:
            RequestError: 400, it is too long, or no text.
        """
        if (ids := self._ahead.pop(index, None)) is not None:
            return ids
        text = self._texts[index]
        if refusal := self._refusal(text):
            raise refusal
        if len(text) > SHORT_CHARS:
            encoded = await asyncio.to_thread(self._tokenizer, [text])
            return list(encoded.input_ids[0])
        chosen, characters = [index], len(text)
        self._next = max(self._next, index + 1)
        for each, following in enumerate(self._texts[self._next : self._next + AHEAD], self._next):
            characters += len(following)
            if characters > SHORT_CHARS:
                break
            self._next = each + 1
            if self._refusal(following) is None:
                chosen.append(each)
        found: list[list[int]] = self._tokenizer([self._texts[each] for each in chosen]).input_ids
        self._ahead.update(zip(chosen[1:], found[1:], strict=True))
        return found[0]

    def _refusal(self, text: str) -> RequestError | None:
        """Return why a text can't be tokenized; None: it can."""
        # The tokens of a text take hundreds of times its memory: a text that can't fit isn't tokenized.
        if len(text) > self._context * self._tokenizer.max_chars_per_token:
            message = (
                f"the prompt has {len(text)} characters; this model's maximum context length of "
                f"{self._context} takes {self._context - 1} tokens"
            )
            return RequestError(400, "invalid_request_error", message)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the prompt is not a valid text: {error.reason} at character {error.start}"
            return RequestError(400, "invalid_request_error", message)
        return None


class GenerateCalls:
    """Completes lists of prompts.

    Args:
        llm: The engine.
        adapters: Its adapters.
        renderer: Renders the chats of vLLM's application.
        defaults: Sampling of a request that doesn't state it; it has `max_tokens`.
    """

    def __init__(self, llm: GatedLLM, adapters: Adapters, renderer: Any, defaults: JSON) -> None:
        self._llm = llm
        self._adapters = adapters
        self._renderer = renderer
        self._tokenizer = llm.get_tokenizer()
        self._defaults = defaults
        self._context: int = llm.model_config.max_model_len
        self._ids = itertools.count()

    async def run(
        self, job: Job, request: GenerateRequest, late: RequestError | None = None
    ) -> GenerateResponse:
        """Complete the prompts of a job that has entered the door.

        A few prompts at a time wait to start.

        Args:
            job: The job. It takes the slot of the first prompt.
            request: The request.
            late: The error of the first prompt, if it can't start in time.

        Raises:
            RequestError: A prompt can't be served, and `partial` is not set.
        """
        sampling = self._sampling(request)
        items: list[Any] = request.prompts or [] if request.messages is None else request.messages
        call = BatchCall("prompts" if request.messages is None else "messages", partial=request.partial)
        results: list[str | None] = [None] * len(items)
        details: list[Detail | None] = [None] * len(items)
        texts = Texts(self._tokenizer, [] if request.messages else items, self._context)
        most = sampling.params.max_tokens or self._context

        async def complete(index: int) -> None:
            item = items[index]
            try:
                if not index:
                    assert job.slot is not None
                    job.placed, slot = True, job.slot
                else:
                    try:
                        # The template of a chat has text of its own.
                        size = len(item) if request.messages is None else self._context
                        slot = await self._llm.door.further(job, BYTES_PER_CHAR * size, most)
                    finally:
                        job.waiting.release()
                tokens = (
                    partial(texts.tokenize, index)
                    if request.messages is None
                    else partial(self._render, item)
                )
                results[index], details[index] = await self._complete(job, slot, tokens, sampling)
            except RequestError as error:
                call.fail(index, error)

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(bool(late), len(items)):
                    if index:
                        await job.waiting.acquire()
                    group.create_task(complete(index))
                    if index % RECORDS_PER_TURN == 0:
                        await asyncio.sleep(0)
                if late is not None:
                    # The others have the same deadline: each is counted as late.
                    call.fail(0, late)
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        response = GenerateResponse(results=results, task_id=request.task_id, usage=_usage(details))
        if request.details:
            response.details = details
        if call.errors is not None:
            response.errors = call.errors
        return response

    def _sampling(self, fields: GenerateRequest) -> Sampling:
        """Return sampling parameters: `fields`, then the config's, then the model's own defaults.

        Raises:
            RequestError: 400, in vLLM's words, with the field.
        """
        given = fields.sampling()
        try:
            params = SamplingParams(**(self._defaults | given), output_kind=RequestOutputKind.FINAL_ONLY)
            # vLLM would refuse each prompt for them.
            params.verify(self._llm.model_config, None, None, None)
        except (VLLMValidationError, ValueError) as error:
            reason = str(error).partition(" (parameter=")[0]
            # The first field that the reason names is the wrong one.
            names = sorted((name for name in given if name in reason), key=reason.index)
            named = getattr(error, "parameter", None) or next(iter(names), None)
            message = reason if named is None or reason.startswith(named) else f"{named}: {reason}"
            raise RequestError(400, "invalid_request_error", message, param=named) from None
        return Sampling(params, may_shorten="max_tokens" not in given, salt=fields.cache_salt)

    async def _complete(
        self, job: Job, slot: Slot, tokens: Callable[[], Awaitable[list[int]]], sampling: Sampling
    ) -> tuple[str, Detail]:
        """Tokenize and complete one prompt in its slot, once that has started.

        Args:
            job: The job.
            slot: The slot of the prompt.
            tokens: Returns the token ids of the prompt.
            sampling: Sampling parameters.

        Raises:
            RequestError: The prompt is wrong or doesn't fit, the batcher refused it, or the engine failed.
        """
        set_current(job)
        failure: BaseException | None = None
        try:
            if slot is job.slot:
                await self._llm.door.wait(job)
            # The adapter may have been removed meanwhile.
            adapter = job.request.adapter
            lora_request = self._adapters.lora_request(adapter) if adapter else None
            token_ids = await tokens()
            params = self._fit(len(token_ids), sampling)
            output = await self._generate(job, slot, token_ids, params, lora_request, sampling.salt)
        except BatcherError as error:
            raise refusal_of(error) from None
        except BaseException as error:
            failure = error
            raise
        finally:
            slot.release(failure)
        detail = Detail(
            finish_reason=output.finish_reason,
            prompt_tokens=len(token_ids),
            completion_tokens=len(output.token_ids),
        )
        return output.text, detail

    async def _generate(
        self,
        job: Job,
        slot: Slot,
        token_ids: list[int],
        params: SamplingParams,
        lora_request: Any,
        salt: str | None,
    ) -> Any:
        """Return vLLM's output for a prompt.

        Raises:
            RequestError: The engine refused it, or failed.
        """
        request_id = f"generate-{next(self._ids)}"
        options = {} if lora_request is None else {"lora_request": lora_request}
        output = None
        try:
            self._llm.door.correct(slot, *self._llm.prepare(job, len(token_ids), params))
            # There is one result, the last; reading on ends the generator.
            async for result in self._llm.run(
                job, slot, tokens_input(token_ids, cache_salt=salt), params, request_id, **options
            ):
                output = result.outputs[0]
        except RequestError:
            raise
        except GracefulHTTPError as error:
            # `refused` has made it of an error that is not the prompt's, such as that of a quota.
            raise job.failure or RequestError(400, "invalid_request_error", str(error)) from None
        except VLLMClientError as error:
            raise RequestError(400, "invalid_request_error", str(error)) from None
        except EngineDeadError as error:
            raise RequestError(503, "service_unavailable", f"The engine failed: {error}") from error
        except Exception as error:
            raise self._failed(request_id, error) from error
        if output is None or output.finish_reason == "error":
            logger.error("the engine ended prompt %s without a result", request_id)
            raise RequestError(500, "internal_error", "The engine ended the request without a result.")
        return output

    def _failed(self, request_id: str, error: Exception) -> RequestError:
        """Log a fault of the service with its stack; return the error of the prompt: other prompts go on."""
        logger.error("prompt %s failed by a fault of the service", request_id, exc_info=error)
        return internal_error(error.__cause__ or error)

    def _fit(self, length: int, sampling: Sampling) -> SamplingParams:
        """Return the sampling parameters of a prompt with `length` tokens.

        Raises:
            RequestError: 400, the prompt is empty, or the context has no space for an answer.
        """
        limit = self._context
        if length >= limit:
            message = (
                f"the prompt has {length} tokens; this model's maximum context length of {limit} takes "
                f"{limit - 1} at most"
            )
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
            f"maximum context length of {limit} tokens; lower max_tokens to {limit - length} or less"
        )
        raise RequestError(400, "invalid_request_error", message)

    async def _render(self, messages: list[JSON]) -> list[int]:
        """Return the token ids of a chat, through the model's chat template.

        Raises:
            RequestError: 400, the chat is wrong.
        """
        if any(map(_has_media, messages)):
            # vLLM would fetch them.
            raise RequestError(400, "invalid_request_error", ONLY_TEXT)
        try:
            # The same call as in vLLM's own chat route.
            rendered = await self._renderer.render_chat(ChatCompletionRequest(messages=messages))
        except ValidationError as error:
            _, message = mistake(error.errors(include_url=False), {"messages": messages})
            raise RequestError(400, "invalid_request_error", message.removeprefix("messages")) from None
        except (VLLMClientError, TemplateError, *OF_REQUESTS) as error:
            raise RequestError(400, "invalid_request_error", str(error)) from None
        if isinstance(rendered, ErrorResponse):
            raise RequestError(400, "invalid_request_error", rendered.error.message)
        _, (prompt,) = rendered
        if prompt["type"] != "token":
            raise RequestError(400, "invalid_request_error", ONLY_TEXT)
        ids: list[int] = prompt["prompt_token_ids"]
        return ids


def _has_media(message: JSON) -> bool:
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return any(part.get("type") in MEDIA or any(key in part for key in MEDIA) for part in parts)


def _usage(details: list[Detail | None]) -> Usage:
    prompt = sum(detail.prompt_tokens for detail in details if detail)
    completion = sum(detail.completion_tokens for detail in details if detail)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
