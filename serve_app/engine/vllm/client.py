"""vLLM's engine client: each prompt of a job runs in a slot that the door has given it."""

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams, envs
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from batcher import Slot
from serve_app.api.errors import RequestError, internal_error
from serve_app.api.headers import trace_context
from serve_app.engine.door import Door
from serve_app.engine.grammars import Grammars, field_of
from serve_app.engine.job import Job, current
from serve_app.engine.openai import OF_REQUESTS, refusal
from serve_app.engine.vllm.resume import go_on, resume_mode
from serve_app.engine.vllm.scheduler import GOALS
from serve_app.engine.vllm.seams import (
    StructuredOutputOptions,
    create_error_response,
    get_structured_output_key,
)
from serve_app.engine.vllm.stats import CountedLLM, CountedPrompt
from serve_app.settings.models import GoalSettings
from serve_app.wire.frame import to_ids

if TYPE_CHECKING:
    from serve_app.engine.vllm.lora import Adapters

SALT = 32
"""Hexadecimal digits of a salt."""

TRANSFERS = {"kv_transfer_params", "ec_transfer_params"}
"""Names in the `extra_args` of sampling parameters that vLLM hands to its connectors."""

MAX_ID = 256
"""Longest id of a request that vLLM gets, in characters: vLLM returns it with each token."""


def goals_left(goals: GoalSettings, age_s: float) -> tuple[float, float]:
    """Return the goals of a request as vLLM's scheduler gets them.

    Args:
        goals: The goals.
        age_s: Seconds since its arrival at the Ingress.

    Returns:
        Seconds that are left until its first token, and seconds per token after it; 0: there is no such goal.
    """
    first_s = goals.ttft_p99_s or 0.0
    # A request that is late by a wait outside the engine asks for no shorter steps.
    return max(first_s - age_s, first_s / 2), goals.tpot_p99_s or 0.0


class GatedLLM(CountedLLM):
    """An `AsyncLLM` whose prompts run in slots of the batcher.

    Attributes:
        adapters: The LoRA adapters.
        door: Gives the slots. A task without a job passes it: the engine's own warm-up.
        by_priority: vLLM schedules by priority too.
        goals: Latency goals of live traffic; None: there are none.
        transfer_keys: Names of the API keys whose requests may move KV caches between engines.
        grammars: Compiles grammars before the engine does.
        salts: Each tenant has a part of the prefix cache of its own.
        traced: vLLM makes spans; see `trace_requests`.
    """

    adapters: "Adapters"
    door: Door
    grammars: Grammars
    by_priority: bool
    goals: GoalSettings | None = None
    transfer_keys: tuple[str, ...] = ()
    salts: bool = False
    traced: bool = False

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as vLLM does, in a slot of the running task's job."""
        job = current()
        if job is not None and not job.searching:
            # vLLM calls this method for all prompts of a request before it runs the first.
            self._count(job, prompt, sampling_params)
            return self._place(job, prompt, sampling_params, request_id, options)
        if job is not None and self.by_priority:
            options["priority"] = job.scheduling.priority
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(
            prompt, sampling_params, request_id, **options
        )
        return outputs

    async def _place(
        self, job: Job, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate in the slot that the door gives the prompt."""
        with noted(job):
            if params.structured_outputs is not None:
                await self._check_grammar(job, params.structured_outputs)
            length = prompt_length(prompt, self.model_config.max_model_len)
            reserved, output_tokens = self.prepare(job, length, params)
            async with self.door.place(job, reserved, output_tokens, params.n) as slot:
                self._check_adapter(options.get("lora_request"))
                results = self.run(job, slot, prompt, params, request_id, **options)
                async with aclosing(results):
                    async for output in results:
                        if any(each.finish_reason == "error" for each in output.outputs):
                            raise GenerationError("the engine gave the request up")
                        yield output

    def prepare(self, job: Job, length: int, params: SamplingParams) -> tuple[int, int]:
        """Bound the options of a prompt, and return its cost.

        Args:
            job: The job.
            length: Tokens of the prompt.
            params: Its sampling, which is changed.

        Returns:
            The tokens of KV cache for the prompt of each of its answers together, and for the answers.

        Raises:
            VLLMValidationError: 400, it takes too much.
        """
        limit = self.model_config.max_model_len
        most = job.request.max_tokens
        if most is not None and (params.max_tokens or limit) > most:
            # A larger value is a default: the Ingress has refused what a client asks for beyond it.
            params.max_tokens = most
        self._check_transfers(job, params)
        if params.bad_words:
            self._check_bad_words(params.bad_words)
        return self._cost(length, params.max_tokens, params.n)

    async def run(
        self, job: Job, slot: Slot, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate in a slot that has started, and keep the account of it.

        Args:
            job: The job.
            slot: The slot of the prompt.
            prompt: The prompt, as tokens.
            params: Its sampling.
            request_id: Id of the prompt.
            options: The other arguments of `AsyncLLM.generate`.
        """
        # The end tells the prompts of a request apart: vLLM appends the index of the prompt.
        request_id = request_id[-MAX_ID:]
        if self.by_priority:
            # Not the priority in the body: the Ingress has decided what its client may ask for.
            options["priority"] = 0 if slot.promoted else job.scheduling.priority
        # A client can write the same field.
        told = {name: value for name, value in (params.extra_args or {}).items() if name != GOALS}
        if self.by_priority and self.goals is not None and options["priority"] <= 0:
            told[GOALS] = goals_left(self.goals, job.request.age_s)
        params.extra_args = told or None
        # The parameters don't change any more, and a copy costs a fifth of vLLM's work on a short prompt.
        params.skip_clone = True
        if job.request.token_ids:
            token_ids = to_ids(job.request.token_ids)
            results = go_on(self, super().generate, prompt, params, request_id, token_ids, **options)
        else:
            results = super().generate(prompt, params, request_id, **options)
        streams = params.output_kind is RequestOutputKind.DELTA
        stream = job.stream if streams else None
        if stream is not None:
            stream.resume = resume_mode(prompt, params)
            if stream.resume != "tokens":
                stream = None
        tokens = 0
        with CountedPrompt(job.usage, slot) as counted:
            async with aclosing(results):
                async for result in results:
                    counted.last = result
                    before = tokens
                    if streams:
                        for output in result.outputs:
                            tokens += len(output.token_ids)
                            if stream is not None:
                                stream.add(output.token_ids)
                        if not before:
                            slot.first_token()
                    else:
                        tokens = sum(len(each.token_ids) for each in result.outputs)
                    slot.report(tokens)
                    yield result

    async def beam_search(
        self,
        search: Callable[..., AsyncGenerator[RequestOutput, None]],
        *,
        prompt: Any,
        params: BeamSearchParams,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a beam search in one slot, as `beam_width` sequences.

        The search asks the engine for each token of each beam, with the text so far as the prompt. It counts
        its prompt once and the tokens that it samples: at most `beam_width` for each of `max_tokens` steps,
        which the quotas reserve, and which the `usage` of the answer never exceeds.

        Args:
            search: The search of vLLM's application.
            prompt: The rendered prompt.
            params: Its width and length.
            options: The other arguments of the search.
        """
        job = current()
        assert job is not None
        length = prompt_length(prompt, self.model_config.max_model_len)
        if job.request.max_tokens is not None:
            params.max_tokens = min(params.max_tokens, job.request.max_tokens)
        width = params.beam_width
        with noted(job):
            if params.structured_outputs is not None:
                await self._check_grammar(job, params.structured_outputs)
            await self._cover(job, length)
            reserved, output_tokens = self._cost(length, params.max_tokens, width)
            async with self.door.place(job, reserved, output_tokens, width) as slot:
                self._check_adapter(options.get("lora_request"))
                job.searching = True
                results = search(prompt=prompt, params=params, **options)
                with CountedPrompt(job.usage, slot, searches=True) as counted:
                    async with aclosing(results):
                        async for output in results:
                            counted.last = output
                            slot.report(sum(len(each.token_ids) for each in output.outputs))
                            yield output

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Encode as vLLM does, in a slot of the running task's job."""
        job = current()
        length = prompt_length(prompt, self.model_config.max_model_len)
        if job is None:
            async for result in super().encode(prompt, pooling_params, request_id, **options):
                yield result
            return
        if self.by_priority:
            options["priority"] = job.scheduling.priority
        with noted(job):
            async with self.door.place(job, self.blocks(length), 0, 1) as slot:
                self._check_adapter(options.get("lora_request"))
                results = super().encode(prompt, pooling_params, request_id, **options)
                with CountedPrompt(job.usage, slot) as counted:
                    async with aclosing(results):
                        async for result in results:
                            # The result is the first token, for the statistics.
                            slot.first_token()
                            counted.last = result
                            yield result

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any) -> Any:
        """Add a request as vLLM does, in its tenant's part of the prefix cache. All routes come here.

        Raises:
            GracefulHTTPError: The quotas of its job don't cover a prompt that is longer than its bound.
            VLLMValidationError: vLLM can't take the prompt, or its parameters.
        """
        if (job := current()) is not None:
            if not job.searching:
                await self._cover(job, prompt_length(prompt, self.model_config.max_model_len))
            if self.traced:
                options["trace_headers"] = trace_context(job.request.headers)
            if self.salts:
                prompt = salted(prompt, job.scheduling.tenant)
        try:
            return await super().add_request(request_id, prompt, params, *args, **options)
        except OF_REQUESTS as error:
            raise VLLMValidationError(str(error)) from error

    async def _cover(self, job: Job, length: int) -> None:
        """Reserve the tokens of a job's prompt beyond its bound; see `add_request` for the errors."""
        try:
            await job.cover(length)
        except RequestError as error:
            raise refused(error) from None

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

    def _check_bad_words(self, words: list[str]) -> None:
        """Refuse bad words with more tokens than vLLM's sampler has room for: an engine on a GPU would end.

        How many tokens a text has is known here only.

        Raises:
            VLLMValidationError: 400.
        """
        if (tokenizer := self.input_processor.tokenizer) is None:
            return
        counted, most = SamplingParams(bad_words=words), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        counted.update_from_tokenizer(tokenizer)
        if (tokens := sum(map(len, counted.bad_words_token_ids or ()))) > most:
            message = f"bad_words: has {tokens} tokens; at most {most} are allowed"
            raise refused(RequestError(400, "invalid_request_error", message, param="bad_words"))

    def _check_adapter(self, request: LoRARequest | None) -> None:
        """Refuse a prompt whose adapter was removed or replaced while the prompt waited.

        Raises:
            RequestError: 404.
        """
        if request is not None and self.adapters.lora_request(request.lora_name) is not request:
            message = f"The model {request.lora_name!r} has been replaced; ask again"
            raise RequestError(404, "not_found_error", message, param="model")

    async def _check_grammar(self, job: Job, outputs: StructuredOutputsParams) -> None:
        """Refuse a grammar that the engine can't compile within its limits.

        Raises:
            VLLMValidationError: 400, with the reason.
            GracefulHTTPError: 503, there is no verdict now.
        """
        job.constrained = True
        if outputs.all_constraints_none():
            return
        try:
            kind, text = get_structured_output_key(outputs)
        except ValueError:
            field = "structured_outputs.json_object"
            message = f"{field}: false states no grammar; leave it out"
            raise refused(RequestError(400, "invalid_request_error", message, param=field)) from None
        if kind is StructuredOutputOptions.JSON_OBJECT:
            return
        name = kind.name.lower()
        try:
            await self.grammars.check(name, text, lambda: field_of(job.request.body, name))
        except RequestError as error:
            raise refused(error) from None

    def _check_transfers(self, job: Job, params: SamplingParams) -> None:
        """Refuse what moves KV caches between engines, except from the keys that the config names.

        Raises:
            VLLMValidationError: 400.
        """
        for name in TRANSFERS & (params.extra_args or {}).keys():
            if job.request.key not in self.transfer_keys:
                message = (
                    f"{name}: is taken only from the API keys in the model's setting `transfer_keys`; leave "
                    "the field out, in vllm_xargs too"
                )
            elif not isinstance(params.extra_args[name], dict):
                message = f"{name}: must be an object"
            else:
                continue
            raise refused(RequestError(400, "invalid_request_error", message, param=name))

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], **options: Any
    ) -> None:
        """Tell the connector, as vLLM's application does for a refused request, if its key may."""
        job = current()
        if job is not None and job.request.key in self.transfer_keys:
            await super().notify_kv_transfer_request_rejected(request_id, kv_transfer_params, **options)

    def _count(self, job: Job, prompt: Any, params: SamplingParams) -> None:
        """Count the values of the answer to a prompt; bound the length of an answer that states none.

        Raises:
            VLLMValidationError: 400, all prompts of the job have too much together.
        """
        length = prompt_length(prompt, self.model_config.max_model_len)
        each, n = self._logprobs(params.logprobs), params.n
        each = max(each, len(params.logprob_token_ids or ()) + 1) if params.logprob_token_ids else each
        if params.output_kind is RequestOutputKind.DELTA:
            each = 0
        facts = job.facts
        if each and facts.output in (None, job.request.max_tokens):
            # A request without a length is not refused for what its answer may have.
            most = (self.door.max_values // (facts.prompts * n) - 1) // each
            params.max_tokens = max(1, min(params.max_tokens or most, most))
        tokens = self.model_config.max_model_len if params.max_tokens is None else params.max_tokens
        values = n * (1 + length * self._logprobs(params.prompt_logprobs) + tokens * each)
        try:
            self.door.count(job, values)
        except RequestError as error:
            raise refused(error) from None

    def _logprobs(self, stated: int | None) -> int:
        """Return the logprobs of a token: its own and the requested logprobs; -1: all."""
        if stated is None:
            return 0
        return self.model_config.get_vocab_size() if stated < 0 else stated + 1

    def _cost(self, length: int, max_tokens: int | None, n: int) -> tuple[int, int]:
        """Return the tokens of KV cache for the prompt of each of `n` answers together, and for the answers.

        Raises:
            VLLMValidationError: 400, they never fit together.
        """
        limit: int = self.model_config.max_model_len
        most = limit if max_tokens is None else min(length + max_tokens, limit)
        reserved, whole = n * self.blocks(length), n * self.blocks(most)
        capacity = self.door.batcher.capacity
        if n > 1 and whole > capacity:
            # One sequence that is as large as the engine runs alone; many of them would keep all others out.
            message = (
                f"n: {n} answers of {most} tokens with their prompts need {whole} tokens of KV cache, and "
                f"the engine has {capacity}; lower n or max_tokens"
            )
            raise refused(RequestError(400, "invalid_request_error", message, param="n"))
        return reserved, whole - reserved

    def blocks(self, tokens: int) -> int:
        """Return the tokens of the KV blocks that `tokens` take up; an encoder has none, and no rounding."""
        cache = self.vllm_config.cache_config
        block: int = cache.block_size if cache.num_gpu_blocks > 1 else 1
        return -(-tokens // block) * block


@contextmanager
def noted(job: Job) -> Iterator[None]:
    """Note in a job why it fails, if a block does: what vLLM's application makes of an exception isn't asked.

    A mistake of the request is an exception of vLLM's classes for it, or a RequestError. An engine that has
    died fails no job, which is answered elsewhere. Every other exception is a fault of the service.

    Args:
        job: The job.
    """
    try:
        yield
    except RequestError as error:
        raise refused(error) from None
    except Exception as error:
        if job.failure is None and not isinstance(error, EngineDeadError):
            if isinstance(error, GenerationError) and job.constrained:
                # Grammars that vLLM can't compile are refused before.
                message = (
                    "The grammar of this request leaves no way on behind the text so far, and vLLM gave up."
                )
                job.failure = RequestError(400, "invalid_request_error", message)
            elif isinstance(error, VLLMClientError | GracefulHTTPError):
                found = create_error_response(error).error
                job.failure = refusal(job, found.code, found.message, found.param)
            else:
                job.failure, job.fault = internal_error(error.__cause__ or error), error
        raise


def refused(error: RequestError) -> VLLMValidationError | GracefulHTTPError:
    """Return the exception by which vLLM's application answers with an error."""
    if (job := current()) is not None:
        # vLLM's answer has neither our types of errors nor the time after which a client may try again.
        job.failure = error
    if error.status == HTTPStatus.BAD_REQUEST:
        return VLLMValidationError(error.message)
    return GracefulHTTPError(error.message, HTTPStatus(error.status))


def salted(prompt: Any, tenant: str) -> Any:
    """Return a rendered prompt that shares the prefix cache with the prompts of one tenant alone.

    Args:
        prompt: The prompt. Its own `cache_salt` separates it further.
        tenant: The tenant.

    Raises:
        TypeError: The prompt is not a rendered one, so it has no place for a salt.
    """
    if not isinstance(prompt, dict):
        raise TypeError(f"a {type(prompt).__name__} as prompt has no place for a salt")
    if prompt.get("type") == "enc_dec":
        return {**prompt, "decoder_prompt": salted(prompt["decoder_prompt"], tenant)}
    # No tenant has a line break. vLLM's connectors take some characters for their own.
    text = f"{tenant}\n{prompt.get('cache_salt') or ''}"
    return {**prompt, "cache_salt": hashlib.sha256(text.encode()).hexdigest()[:SALT]}


def prompt_length(prompt: Any, limit: int) -> int:
    """Return the tokens of a rendered prompt; `limit` where that can't be known yet, or there are more."""
    if isinstance(prompt, dict):
        for key in ("prompt_token_ids", "prompt_embeds"):
            if (tokens := prompt.get(key)) is not None:
                # vLLM refuses a longer one.
                return min(len(tokens), limit)
    return limit
