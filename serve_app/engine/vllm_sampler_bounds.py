"""Bounds of vLLM's sampler on the token ids and the seed of a request.

Only files named vllm_* import vllm. The imports are those of vLLM 0.32.
"""

from typing import Any

from vllm import SamplingParams, envs
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

from serve_app.api.errors import RequestError

MAX_BAD_WORDS_CHARS = 16_384
"""Characters of all `bad_words`: vLLM tokenizes them on the event loop."""

LARGEST_SEED = 2**63 - 1


def oversize_ids(params: SamplingParams, processor: Any) -> RequestError | None:
    """Return the error of a request with more token ids than the engine can take; None: it has fewer.

    vLLM's runner V2 has room for so many, and an engine that gets more ends. The runner before it takes any
    number.

    Args:
        params: The sampling of the request.
        processor: The input processor of the engine.
    """
    if (chars := sum(map(len, params.bad_words or ()))) > MAX_BAD_WORDS_CHARS:
        return _error("bad_words", f"{chars} characters", MAX_BAD_WORDS_CHARS)
    ends = params.min_tokens > 0 and params.stop_token_ids
    if not (params.logit_bias or params.allowed_token_ids or params.bad_words or ends):
        return None
    if not processor.vllm_config.use_v2_model_runner:
        return None
    # As it reaches the engine: with the tokens that end an answer by the model's own configuration.
    whole = params.clone()
    whole.update_from_generation_config(
        processor.generation_config_fields, processor.renderer.get_eos_token_id()
    )
    if processor.tokenizer is not None:
        whole.update_from_tokenizer(processor.tokenizer)
    bad_words = sum(map(len, whole.bad_words_token_ids or ()))
    for field, count, most in (
        ("logit_bias", len(whole.logit_bias or ()), MAX_NUM_LOGIT_BIAS_TOKENS),
        ("allowed_token_ids", len(whole.allowed_token_ids or ()), MAX_NUM_ALLOWED_TOKEN_IDS),
        ("stop_token_ids", len(whole.all_stop_token_ids) if ends else 0, MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", bad_words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            return _error(field, f"{count} token ids", most)
    return None


def bound_seed(params: SamplingParams) -> None:
    """Lower a seed so far that those of all answers fit into 64 bits: vLLM adds the number of the answer."""
    if params.seed is not None:
        params.seed = min(params.seed, LARGEST_SEED - (params.n - 1))


def _error(field: str, amount: str, most: int) -> RequestError:
    message = f"{field}: {amount}, and the engine has room for {most}; send fewer"
    return RequestError(400, "invalid_request_error", message, param=field)
