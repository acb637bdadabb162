"""Tokens that the answers of a batch report."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from serve_app.api.protocol import JSON

MOST = 1 << 40
"""Numbers beyond this are no numbers of tokens."""


class Tokens(NamedTuple):
    """Tokens of answers, as the `usage` of OpenAI's API counts them.

    Attributes:
        input_tokens: Tokens of the prompts.
        cached_tokens: Those of them that were in a cache.
        output_tokens: Tokens of the answers.
        reasoning_tokens: Those of them that are reasoning.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


NO_TOKENS = Tokens()


def tokens_of(answer: Any) -> Tokens:
    """Return what an answer reports: of chats and completions, responses, embeddings, or `/generate`."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return NO_TOKENS
    if "input_tokens" in usage:
        read, written = "input_tokens", "output_tokens"
    else:
        read, written = "prompt_tokens", "completion_tokens"
    return Tokens(
        _number(usage.get(read)),
        _number(_part(usage, f"{read}_details").get("cached_tokens")),
        _number(usage.get(written)),
        _number(_part(usage, f"{written}_details").get("reasoning_tokens")),
    )


def together(tokens: Iterable[Tokens]) -> Tokens:
    """Return the tokens of several answers."""
    return Tokens(*map(sum, zip(NO_TOKENS, *tokens, strict=True)))


def _part(usage: JSON, name: str) -> JSON:
    part = usage.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= MOST else 0
