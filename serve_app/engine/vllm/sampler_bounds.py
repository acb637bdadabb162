"""Bounds on what a request makes vLLM do for each token, and on its seed.

vLLM's scheduler and sampler go through some lists of a request in Python at each token of its answer. All
sequences of a step wait for that.

Issue: none found; https://github.com/vllm-project/vllm/pull/16529 ended the same for ids that the
vocabulary has not. Mended: not in 0.33.

"""

from typing import Any

from vllm import SamplingParams, envs

from serve_app.api.errors import RequestError
from serve_app.engine.vllm.seams import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

MAX_BAD_WORDS_CHARS = 16_384
"""Characters of all `bad_words`: vLLM tokenizes them on the event loop."""

MAX_STOP_CHARS = 16_384
"""Characters of all `stop` strings: each is searched for at each token."""

MAX_COMPARED = 4_096
"""Tokens that `repetition_detection` may compare at each token, in a fifth of a millisecond: no answer is the
worst one for all sizes of patterns at once."""

EACH_TOKEN = "all other requests wait while the engine goes through them"

LARGEST_SEED = 2**63 - 1


def oversize(params: SamplingParams, processor: Any) -> RequestError | None:
    """Return the error of a request that costs too much at each token; None: it doesn't.

    vLLM's runner V2 has room for a number of token ids, and an engine that gets more ends. The runner before
    it takes any number of `allowed_token_ids`, once for a request. The other lists have the same bounds with
    both, which go through them again and again.

    Args:
        params: The sampling of the request.
        processor: The input processor of the engine.
    """
    for field, count, most in (
        ("bad_words", sum(map(len, params.bad_words or ())), MAX_BAD_WORDS_CHARS),
        ("stop", sum(map(len, params.stop or ())), MAX_STOP_CHARS),
    ):
        if count > most:
            return _error(field, f"{count} characters", most, EACH_TOKEN)
    for field, count, most in (
        ("stop_token_ids", len(params.stop_token_ids or ()), MAX_NUM_STOP_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), MAX_NUM_LOGIT_BIAS_TOKENS),
    ):
        if count > most:
            return _error(field, f"{count} token ids", most, EACH_TOKEN)
    if params.repetition_detection is not None and (compared := _compared(params)) > MAX_COMPARED:
        message = (
            f"repetition_detection: {compared} tokens may be compared at each token of the answer, and at "
            f"most {MAX_COMPARED} are allowed, since all others wait meanwhile; lower max_pattern_size"
        )
        return RequestError(400, "invalid_request_error", message, param="repetition_detection")
    ends = params.min_tokens > 0 and params.stop_token_ids
    if not (params.allowed_token_ids or params.bad_words or ends):
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
        ("allowed_token_ids", len(whole.allowed_token_ids or ()), MAX_NUM_ALLOWED_TOKEN_IDS),
        ("stop_token_ids", len(whole.all_stop_token_ids) if ends else 0, MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", bad_words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            return _error(field, f"{count} token ids", most, "the engine has room for no more")
    return None


def _compared(params: SamplingParams) -> int:
    """Return how many tokens vLLM's `check_sequence_repetition` compares at a token, at most.

    It tries each size of a pattern, as long as the answer is long enough for all repetitions of it.
    """
    detection = params.repetition_detection
    count: int = detection.min_count
    smallest: int = max(1, detection.min_pattern_size)
    largest: int = detection.max_pattern_size
    if largest < 1 or count < 2:
        return 0
    if params.max_tokens is not None:
        largest = min(largest, params.max_tokens // count)
    sizes = (smallest + largest) * max(0, largest - smallest + 1) // 2
    return sizes * (count - 1)


def bound_seed(params: SamplingParams) -> None:
    """Lower a seed so far that those of all answers fit into 64 bits: vLLM adds the number of the answer."""
    if params.seed is not None:
        params.seed = min(params.seed, LARGEST_SEED - (params.n - 1))


def _error(field: str, amount: str, most: int, reason: str) -> RequestError:
    message = f"{field}: {amount}, and at most {most} are allowed, since {reason}; send fewer"
    return RequestError(400, "invalid_request_error", message, param=field)
