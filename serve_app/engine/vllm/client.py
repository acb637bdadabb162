"""vLLM's engine client with admission in front of every request.

The imports are those of vLLM 0.32.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any

from vllm import SamplingParams
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import get_structured_output_key

from batcher import ContinuousBatcher, Slot
from serve_app.api.errors import RequestError
from serve_app.engine.admission import current
from serve_app.engine.grammar_check import GrammarCheck
from serve_app.engine.grammars import Grammar
from serve_app.engine.stream_interval import PieceRate, StreamInterval
from serve_app.engine.vllm.admitted_slot import AdmittedSlot
from serve_app.engine.vllm.lora import Adapters
from serve_app.engine.vllm.refusal import RefusedError
from serve_app.engine.vllm.resume import go_on, resume_mode
from serve_app.engine.vllm.sampler_bounds import bound_seed, oversize
from serve_app.engine.vllm.scheduler import may_be_held
from serve_app.relay.resume import StreamTokens

NO_ADAPTER = nullcontext()

FIELD = "structured_outputs"
"""Field that a refusal names for a grammar that vLLM has made of several fields."""

MAX_ID = 256
"""Characters of an id that vLLM gets, which come back with each token. One of the Ingress has 128 at most."""


class GatedLLM(AsyncLLM):  # type: ignore[misc]
    """An `AsyncLLM` whose requests are admitted by a batcher first.

    Attributes:
        batcher: Admits the requests.
        piece_rate: Bounds the pieces per second of all streams.
        by_priority: vLLM schedules by priority too.
        max_prompt_logprobs: Most logprobs of prompt tokens that a prompt may ask for.
        prompt_tokens: Tokens of the prompts that were admitted.
        adapters: The LoRA adapters that requests may name.
        grammars: Checks the grammars that the engine compiles; None: another backend than xgrammar does.
    """

    batcher: ContinuousBatcher
    piece_rate: PieceRate
    by_priority: bool
    max_prompt_logprobs: int
    prompt_tokens: int = 0
    adapters: Adapters
    grammars: GrammarCheck | None = None

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        limit: int = self.model_config.max_model_len
        # The end tells the prompts of a request apart.
        request_id = request_id[-MAX_ID:]
        length = _prompt_length(prompt, limit)
        request, result = current()
        if request.max_tokens is not None and (sampling_params.max_tokens or limit) > request.max_tokens:
            # A larger value is a default: the Ingress has refused what a client asks for beyond it.
            sampling_params.max_tokens = request.max_tokens
        if self.by_priority:
            # Not the priority in the body: the Ingress has decided what its client may ask for.
            options["priority"] = request.scheduling.priority
        if result.searching:
            results = super().generate(prompt, sampling_params, request_id, **options)
            async with aclosing(results):
                async for output in results:
                    yield output
            return
        if sampling_params.structured_outputs is not None:
            result.constrained = True
            await self._check_grammar(sampling_params.structured_outputs)
        self._check_prompt_logprobs(length, sampling_params)
        self._check_cost(sampling_params)
        bound_seed(sampling_params)
        admitted = self._slot(length, sampling_params.max_tokens, sampling_params.n)
        # The parameters don't change any more, and a copy costs a fifth of vLLM's work on a short prompt.
        sampling_params.skip_clone = True
        if request.token_ids:
            token_ids = list(request.token_ids)
            results = go_on(self, super().generate, prompt, sampling_params, request_id, token_ids, **options)
        else:
            results = super().generate(prompt, sampling_params, request_id, **options)
        async with (
            admitted as slot,
            self._adapter(options),
            aclosing(results),
        ):
            self.prompt_tokens += length
            if sampling_params.output_kind is RequestOutputKind.DELTA:
                if (stream := result.stream) is not None:
                    stream.resume = resume_mode(prompt, sampling_params)
                async for output in self._stream(results, sampling_params, slot, request_id, stream):
                    admitted.last = output
                    yield output
                return
            async for output in results:
                admitted.last = output
                slot.report(sum(len(each.token_ids) for each in output.outputs))
                yield output

    async def beam_search(
        self,
        search: Callable[..., AsyncGenerator[RequestOutput, None]],
        *,
        prompt: Any,
        params: BeamSearchParams,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a beam search in one slot, as `beam_width` sequences.

        Args:
            search: The search of vLLM's application, which asks the engine once for each token of each beam.
            prompt: The rendered prompt.
            params: Its width and length.
            options: The other arguments of the search.
        """
        length = _prompt_length(prompt, self.model_config.max_model_len)
        request, result = current()
        if request.max_tokens is not None:
            params.max_tokens = min(params.max_tokens, request.max_tokens)
        results = search(prompt=prompt, params=params, **options)
        admitted = self._slot(length, params.max_tokens, params.beam_width)
        async with admitted as slot, self._adapter(options), aclosing(results):
            self.prompt_tokens += length
            result.searching = True
            async for output in results:
                admitted.last = output
                slot.report(sum(len(each.token_ids) for each in output.outputs))
                yield output

    async def _add_request(
        self, request: Any, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        try:
            await super()._add_request(request, prompt, parent_req, index, queue)
        except BaseException:
            # A value that the engine's protocol can't carry, or a client that has left. vLLM has noted the
            # request already, and would count it among those that run for good.
            await self.abort((parent_req or request).request_id, internal=True)
            raise

    def _adapter(self, options: dict[str, Any]) -> AbstractAsyncContextManager[None]:
        """Return what holds the adapter of a request, if it has one."""
        request = options.get("lora_request")
        return NO_ADAPTER if request is None else self._hold(request)

    @asynccontextmanager
    async def _hold(self, request: Any) -> AsyncIterator[None]:
        """Hold an adapter while vLLM has a request for it.

        Raises:
            RefusedError: 404, it was removed while the request waited.
        """
        try:
            await (held := self.adapters.using(request)).__aenter__()
        except RequestError as error:
            raise _refused(error) from None
        try:
            yield
        finally:
            await held.__aexit__(None, None, None)

    async def _check_grammar(self, outputs: StructuredOutputsParams) -> None:
        """Refuse a grammar that the engine can't compile.

        vLLM's validation lets such a grammar pass where another of its backends takes it, and an engine has
        one backend for all requests; the answer would end with an internal error.

        Raises:
            RefusedError: 400, with the reason; or 503, it can't be checked now.
        """
        if self.grammars is None or outputs.all_constraints_none():
            return
        kind, text = get_structured_output_key(outputs)
        if kind is StructuredOutputOptions.JSON_OBJECT:
            return
        grammar = Grammar(kind.name.lower(), text, FIELD)
        try:
            await self.grammars.compile(grammar, current().request.grammars)
        except RequestError as error:
            raise _refused(error) from None

    def _check_prompt_logprobs(self, length: int, params: SamplingParams) -> None:
        """Refuse more logprobs of a prompt than the event loop can make without holding others up.

        Raises:
            RefusedError: 400.
        """
        each, n = params.prompt_logprobs, params.n
        if each is None:
            return
        # vLLM adds the prompt's own token to those that are asked for; -1 are all of the vocabulary.
        every = self.model_config.get_vocab_size() if each < 0 else each + 1
        if n * length * every <= self.max_prompt_logprobs:
            return
        answers = f", for each of {n} answers," if n > 1 else ""
        message = (
            f"prompt_logprobs: {length} prompt tokens with {every} logprobs each{answers} are more than "
            f"{self.max_prompt_logprobs} (max_prompt_logprobs); ask for fewer, or send a shorter prompt"
        )
        raise _refused(RequestError(400, "invalid_request_error", message, param="prompt_logprobs"))

    def _check_cost(self, params: SamplingParams) -> None:
        """Refuse what takes the engine too long at each token.

        Raises:
            RefusedError: 400.
        """
        error = oversize(params, self.input_processor)
        if error is not None:
            raise _refused(error)

    def _slot(self, length: int, max_tokens: int | None, n: int) -> AdmittedSlot:
        """Return the slot of `n` sequences with one prompt.

        Raises:
            RefusedError: 400, they never fit together.
        """
        limit: int = self.model_config.max_model_len
        most = limit if max_tokens is None else min(length + max_tokens, limit)
        reserved, whole = n * self._blocks(length), n * self._blocks(most)
        capacity = self.batcher.capacity
        if n > 1 and whole > capacity:
            # One sequence that is as large as the engine runs alone; many of them would keep all others out.
            message = (
                f"n: {n} answers of {most} tokens with their prompts need {whole} tokens of KV cache, and "
                f"the engine has {capacity}; lower n or max_tokens"
            )
            raise _refused(RequestError(400, "invalid_request_error", message, param="n"))
        return AdmittedSlot(self.batcher, reserved, whole - reserved, length, n)

    async def _stream(
        self,
        results: AsyncGenerator[RequestOutput, None],
        params: SamplingParams,
        slot: Slot,
        request_id: str,
        stream: StreamTokens | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.piece_rate.streams += 1
        if stream is not None and stream.resume != "tokens":
            stream = None
        tokens = 0
        try:
            async for result in results:
                before = tokens
                for output in result.outputs:
                    tokens += len(output.token_ids)
                    if stream is not None:
                        stream.add(output.token_ids)
                if not before:
                    slot.first_token()
                    # Others come at the pace of their pieces; an interval that the client asks for is kept.
                    if params.stream_interval is None and not may_be_held(params):
                        self._pace(request_id)
                slot.report(tokens)
                yield result
        finally:
            self.piece_rate.streams -= 1

    def _pace(self, request_id: str) -> None:
        """Let the pieces of a running stream keep the rate, unless the engine's options set an interval."""
        processor = self.output_processor
        for each in processor.external_req_ids.get(request_id, ()):
            state = processor.request_states.get(each)
            if state is not None and state.stream_interval == 1:
                # vLLM counts the tokens that were sent only while the interval is above one.
                state.sent_tokens_offset = state.detokenizer.num_output_tokens()
                state.stream_interval = StreamInterval(self.piece_rate)

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        length = _prompt_length(prompt, self.model_config.max_model_len)
        if self.by_priority:
            options["priority"] = current().request.scheduling.priority
        results = super().encode(prompt, pooling_params, request_id, **options)
        admitted = AdmittedSlot(self.batcher, self._blocks(length), 0, length)
        async with admitted as slot, self._adapter(options), aclosing(results):
            self.prompt_tokens += length
            async for result in results:
                # Goals look at the first token; here that is the result.
                slot.first_token()
                admitted.last = result
                yield result

    def _blocks(self, tokens: int) -> int:
        """Return the tokens of the KV blocks that `tokens` take up; an encoder has none, and no rounding."""
        cache = self.vllm_config.cache_config
        block: int = cache.block_size if cache.num_gpu_blocks > 1 else 1
        return -(-tokens // block) * block


def _refused(error: RequestError) -> RefusedError:
    """Note the answer of the current request, and return what ends it in vLLM."""
    current().result.refusal = error
    return RefusedError(error)


def _prompt_length(prompt: Any, limit: int) -> int:
    """Return the tokens of a rendered prompt; `limit` where that can't be known yet, or there are more."""
    if isinstance(prompt, dict):
        for key in ("prompt_token_ids", "prompt_embeds"):
            if (tokens := prompt.get(key)) is not None:
                # vLLM refuses a longer one.
                return min(len(tokens), limit)
    return limit
