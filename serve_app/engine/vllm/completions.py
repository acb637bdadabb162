"""The completions of `/generate`.

The imports are those of vLLM 0.32.
"""

import itertools
import logging
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve_app.api.errors import RequestError, internal_error
from serve_app.api.protocol import JSON, SamplingFields
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.lora import Adapters
from serve_app.engine.vllm.refusal import RefusedError, is_fault

logger = logging.getLogger("ray.serve")


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        params: vLLM's parameters.
        may_shorten: `max_tokens` is a default, which a long prompt may reduce.
    """

    params: SamplingParams
    may_shorten: bool


@dataclass(slots=True, frozen=True)
class Completion:
    """The completion of one prompt."""

    text: str
    finish_reason: str | None
    tokens: int


class Completions:
    """Completes prompts.

    Args:
        llm: The engine.
        adapters: Its adapters.
        defaults: Sampling of a request that doesn't state it; it has `max_tokens`.
        max_model_len: Tokens of the context.
    """

    def __init__(self, llm: GatedLLM, adapters: Adapters, defaults: JSON, max_model_len: int) -> None:
        self._llm = llm
        self._adapters = adapters
        self._defaults = defaults
        self._max_model_len = max_model_len
        self._ids = itertools.count()

    def sampling(self, fields: SamplingFields) -> Sampling:
        """Return sampling parameters: `fields`, then the config's, then the model's own defaults.

        Raises:
            RequestError: 400, in vLLM's words.
        """
        given = fields.sampling()
        try:
            params = SamplingParams(**(self._defaults | given), output_kind=RequestOutputKind.FINAL_ONLY)
        except (VLLMValidationError, ValueError, TypeError) as error:
            if is_fault(error):
                raise
            raise RequestError(400, "invalid_request_error", str(error)) from None
        return Sampling(params, may_shorten="max_tokens" not in given)

    async def complete(self, token_ids: list[int], sampling: Sampling, adapter: str = "") -> Completion:
        """Generate one completion.

        Args:
            token_ids: The prompt.
            sampling: Its sampling.
            adapter: Id of the adapter; empty: none.

        Raises:
            RequestError: The prompt doesn't fit, the batcher refused it, or the engine failed.
        """
        params = self._fit(len(token_ids), sampling)
        request_id = f"generate-{next(self._ids)}"
        options: dict[str, Any] = {}
        if adapter:
            # A 404 if it was removed while the prompt was tokenized.
            options["lora_request"] = self._adapters.lora_request(adapter)
        try:
            # There is one result, the last; reading on ends the generator and frees its slot.
            output = None
            async for result in self._llm.generate(tokens_input(token_ids), params, request_id, **options):
                output = result.outputs[0]
        except RefusedError as error:
            raise error.error from None
        except VLLMClientError as error:
            raise RequestError(400, "invalid_request_error", str(error)) from None
        except EngineDeadError as error:
            raise RequestError(503, "service_unavailable", f"The engine failed: {error}") from error
        except EngineGenerateError as error:
            if is_fault(error):
                raise self._failed(request_id, error) from error
            raise RequestError(400, "invalid_request_error", str(error.__cause__)) from None
        except Exception as error:
            raise self._failed(request_id, error) from error
        if output is None or output.finish_reason == "error":
            logger.error("the engine ended prompt %s without a result", request_id)
            raise RequestError(500, "internal_error", "The engine ended the request without a result.")
        return Completion(output.text, output.finish_reason, len(output.token_ids))

    def _failed(self, request_id: str, error: Exception) -> RequestError:
        """Log a fault of the service with its stack; return the error of the prompt: others go on."""
        logger.error("prompt %s failed by a fault of the service", request_id, exc_info=error)
        return internal_error(error.__cause__ or error)

    def _fit(self, length: int, sampling: Sampling) -> SamplingParams:
        limit = self._max_model_len
        if length >= limit:
            message = f"the prompt has {length} tokens; this model takes {limit - 1} at most"
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
            f"context of {limit} tokens; lower max_tokens to {limit - length} or less"
        )
        raise RequestError(400, "invalid_request_error", message)
