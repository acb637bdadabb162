"""Tokens that the answers of a batch report, and the work that they are."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from serve_app.api.protocol import JSON

MOST = 1 << 40
"""Numbers beyond this are no numbers of tokens."""


PROMPT = 0.5
"""Work of a token of a prompt, in tokens of an answer. A row of P and N tokens, beside n rows,
takes an engine P * per_prefill_token_ms + N * (base_ms / n + per_sequence_ms): with 100 to 256 rows, a token
of a prompt takes 0.4 to 0.6 times as long as a token of an answer (`serve_app/simulation/profiles.py`)."""

ROW = 1.0
"""Work of a row beside its tokens: some answers report none."""

BYTES = 4
"""Bytes of a row's line that make a token of its prompt, about."""

USUAL_OUTPUT = 512
"""Bound of an answer that states none."""

BOUNDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

WITHOUT_OUTPUT = frozenset({"/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"})


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


def work_of(rows: int, tokens: Tokens) -> float:
    """Return the work of rows that were run, in tokens of an answer.

    Unlike rows per second, work per second is about the same for short rows and for long ones; so a rate that
    was measured with one batch says something about another.
    """
    return ROW * rows + PROMPT * max(0, tokens.input_tokens - tokens.cached_tokens) + tokens.output_tokens


def bound_of(endpoint: str, body: JSON, size: int) -> float:
    """Return the work that a row is, if its answer is as long as it may be.

    Args:
        endpoint: The endpoint of its batch.
        body: Its body, which may be wrong.
        size: Bytes of its line.
    """
    output = 0
    if endpoint not in WITHOUT_OUTPUT:
        stated = [number for name in BOUNDS if (number := _number(body.get(name)))]
        output = min(stated, default=USUAL_OUTPUT) * max(1, min(_number(body.get("n")), 128))
    return ROW + PROMPT * size / BYTES + output


def together(tokens: Iterable[Tokens]) -> Tokens:
    """Return the tokens of several answers."""
    return Tokens(*map(sum, zip(NO_TOKENS, *tokens, strict=True)))


def _part(usage: JSON, name: str) -> JSON:
    part = usage.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= MOST else 0
