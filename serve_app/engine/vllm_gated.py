"""vLLM's engine client with the batcher in front of every request, and streams that go on from their tokens.

Only files whose names begin with vllm_ import vllm. The imports are those of vLLM 0.32.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from batcher import BatcherError, ContinuousBatcher, Slot
from serve_app.api.errors import RequestError
from serve_app.engine import admission
from serve_app.engine.admission import Admission
from serve_app.engine.stream_interval import StreamInterval
from serve_app.relay.resume import Resume, Trail
from serve_app.relay.usage import PromptUsage

GREEDY = 1e-5
"""Below this temperature vLLM draws nothing and takes the likeliest token."""


class RefusedError(GracefulHTTPError):  # type: ignore[misc]
    """The gate refused a request; vLLM's application ends it without a stack trace."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message, HTTPStatus(error.status))
        self.error = error


class GatedLLM(AsyncLLM):  # type: ignore[misc]
    """An `AsyncLLM` whose every request waits for its place in the batcher first."""

    batcher: ContinuousBatcher
    pace: StreamInterval
    by_class: bool
    """Whether vLLM schedules by priority."""
    prompt_tokens: int = 0
    """Tokens of the prompts that it has begun."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        limit: int = self.model_config.max_model_len
        length = _prompt_length(prompt, limit)
        output = sampling_params.max_tokens
        most = limit if output is None else min(length + output, limit)
        n = sampling_params.n
        reserved = n * self._blocks(length)
        if self.by_class:
            # The gate's class, whatever the body says: what a client may ask for is decided before.
            options["priority"] = (admission.current.get() or Admission()).scheduling.priority
        # Nobody changes them any more; a deep copy costs a fifth of all that vLLM does to a short prompt.
        sampling_params.skip_clone = True
        request = admission.current.get()
        if request is not None and request.token_ids:
            results = self._go_on(prompt, sampling_params, request_id, request.token_ids, **options)
        else:
            results = super().generate(prompt, sampling_params, request_id, **options)
        async with (
            _Gate(self.batcher, reserved, n * self._blocks(most) - reserved, length) as slot,
            aclosing(results),
        ):
            self.prompt_tokens += length
            if sampling_params.output_kind is RequestOutputKind.DELTA:
                trail = None if request is None else request.trail
                if trail is not None:
                    trail.resume = _resume(prompt, sampling_params)
                async for result in self._stream(results, sampling_params, slot, request_id, trail):
                    yield result
                return
            async for result in results:
                slot.report(sum(len(output.token_ids) for output in result.outputs))
                yield result

    async def _stream(
        self,
        results: AsyncGenerator[RequestOutput, None],
        params: SamplingParams,
        slot: Slot,
        request_id: str,
        trail: Trail | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        pace = self.pace
        pace.streams += 1
        # Who asks for an interval gets it.
        ours = params.stream_interval is None
        interval = params.stream_interval = params.stream_interval or pace.tokens_per_piece()
        if trail is not None and trail.resume != "tokens":
            trail = None
        tokens = 0
        try:
            async for result in results:
                before = tokens
                for output in result.outputs:
                    tokens += len(output.token_ids)
                    if trail is not None:
                        trail.add(output.token_ids)
                if not before:
                    slot.first_token()
                pace.count(tokens - before)
                slot.report(tokens)
                yield result
                if ours and interval != (interval := pace.tokens_per_piece()):
                    self._travel_together(request_id, interval)
        finally:
            pace.streams -= 1

    def _travel_together(self, request_id: str, tokens: int) -> None:
        """Change how many tokens of a stream that runs travel together.

        vLLM counts what has left only while that is more than one token: so it's told what has left
        when it starts to count, and never stops.
        """
        processor = self.output_processor
        for each in processor.external_req_ids.get(request_id, ()):
            if state := processor.request_states.get(each):
                if state.stream_interval == 1:
                    state.sent_tokens_offset = state.detokenizer.num_output_tokens()
                state.stream_interval = max(2, tokens)

    async def _go_on(
        self, prompt: Any, params: SamplingParams, request_id: str, token_ids: list[int], **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate what follows `token_ids`, and tell it as though these came with the first token."""
        tokenizer = self.get_tokenizer()
        rest = params.clone()
        processor = self.input_processor
        rest.update_from_generation_config(
            processor.generation_config_fields, processor.renderer.get_eos_token_id()
        )
        if (
            params.stop
            or len(token_ids) >= (params.max_tokens or self.model_config.max_model_len)
            or (token_ids[-1] in rest.all_stop_token_ids and not params.ignore_eos)
        ):
            # It may have been the last: then it ends again where it ended.
            token_ids = token_ids[:-1]
        prompt_ids = prompt["prompt_token_ids"]
        told = IncrementalDetokenizer.from_new_request(
            tokenizer,
            SimpleNamespace(
                request_id=request_id,
                prompt_token_ids=prompt_ids,
                prompt_embeds=None,
                sampling_params=params,
            ),
        )
        told.update(token_ids, False)
        if rest.max_tokens is not None:
            rest.max_tokens -= len(token_ids)
        rest.min_tokens = max(0, params.min_tokens - len(token_ids))
        # The text is that of all tokens, and so is what stops it.
        rest.detokenize = False
        rest.stop = []
        rest.output_text_buffer_length = 0
        longer = {**prompt, "prompt_token_ids": prompt_ids + token_ids}
        results = super().generate(longer, rest, request_id, **options)
        async with aclosing(results):
            async for result in results:
                (output,) = result.outputs
                stop = told.update(output.token_ids, output.finish_reason == "stop")
                if stop is not None:
                    output.finish_reason, output.stop_reason, result.finished = "stop", stop, True
                output.text = told.get_next_output_text(output.finish_reason is not None, True)
                output.token_ids = [*token_ids, *output.token_ids]
                token_ids = []
                result.prompt_token_ids = prompt_ids
                yield result
                if stop is not None:
                    return

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        length = _prompt_length(prompt, self.model_config.max_model_len)
        results = super().encode(prompt, pooling_params, request_id, **options)
        async with _Gate(self.batcher, self._blocks(length), 0, length), aclosing(results):
            async for result in results:
                yield result

    def _blocks(self, tokens: int) -> int:
        """Return the tokens of the KV blocks that `tokens` take up."""
        block: int = self.vllm_config.cache_config.block_size
        return -(-tokens // block) * block


class _Gate:
    """A slot of the batcher that tells the request's `Admission` when it is refused."""

    __slots__ = ("_admission", "_length", "_slot")

    def __init__(self, batcher: ContinuousBatcher, prompt_tokens: int, max_tokens: int, length: int) -> None:
        self._length = length
        self._admission = request = admission.current.get() or Admission()
        batcher.weigh(request.scheduling.tenant, request.scheduling.weight)
        self._slot = batcher.slot(
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            priority=request.scheduling.priority,
            tenant=request.scheduling.tenant,
            deadline=request.deadline,
            wait=request.wait,
        )

    async def __aenter__(self) -> Slot:
        try:
            slot = await self._slot.__aenter__()
        except BatcherError as error:
            self._admission.refusal = admission.explain(error)
            raise RefusedError(self._admission.refusal) from None
        self._admission.admitted = True
        return slot

    async def __aexit__(self, *exc: Any) -> None:
        slot = self._slot
        await slot.__aexit__(*exc)
        self._admission.usage.add(
            PromptUsage(
                slot.submitted_at, slot.started_at, time.monotonic(), self._length, slot.output_tokens
            )
        )


def _resume(prompt: Any, params: SamplingParams) -> Resume:
    """Return how a stream could go on in another engine.

    What was drawn freely goes on with other draws, as likely as those that it would have had. What was
    drawn with a seed can only be drawn again from its start: where the generator stood isn't known.
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
        # They look at what was generated, and it becomes part of the prompt.
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.bad_words
    )
    if stateless and (greedy or params.seed is None):
        return "tokens"
    return "again" if greedy or params.seed is not None else ""


def _prompt_length(prompt: Any, limit: int) -> int:
    """Return the tokens of a rendered prompt, or `limit` where that can't be known yet."""
    if isinstance(prompt, dict):
        for key in ("prompt_token_ids", "prompt_embeds"):
            if (tokens := prompt.get(key)) is not None:
                return len(tokens)
    return limit
