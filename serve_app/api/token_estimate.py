"""Estimates of a request's tokens before anything has counted them."""

from typing import Any

BYTES_PER_TOKEN = 4
"""Bytes of text per token, about: English with a large vocabulary."""

EXPECTED_OUTPUT = 256
"""Tokens of an answer, at most: the limit that a request states is mostly far above what it takes."""


def estimate_tokens(prompt_bytes: int, answers: int, max_tokens: int | None) -> int:
    """Return about how many tokens a request takes up.

    Args:
        prompt_bytes: Bytes of its prompts.
        answers: How many answers it asks for, over all prompts.
        max_tokens: Its limit for each answer; None: it states none.
    """
    output = EXPECTED_OUTPUT if max_tokens is None else min(max_tokens, EXPECTED_OUTPUT)
    return prompt_bytes // BYTES_PER_TOKEN + answers * max(0, output)


def estimate_call(body: Any) -> int:
    """Return about how many tokens a `generate` call over a handle takes up, whatever its argument is.

    Args:
        body: A `GenerateRequest`, or an object with its fields; nothing has checked it.
    """

    def value(name: str) -> Any:
        return body.get(name) if isinstance(body, dict) else getattr(body, name, None)

    # An array of NumPy, as a column of a dataset is, has no truth value.
    lists = [found for name in ("prompts", "messages") if isinstance(found := value(name), list)]
    prompts = next(filter(None, lists), None)
    if prompts is None:
        return EXPECTED_OUTPUT
    limit = value("max_tokens")
    return estimate_tokens(len(repr(prompts)), len(prompts), limit if isinstance(limit, int) else None)
