"""The part of a request that the choice of a replica depends on."""

from typing import NamedTuple

from serve_app.api.token_estimate import EXPECTED_OUTPUT, estimate_tokens
from serve_app.ingress.body import JSONBody
from serve_app.ingress.limits import CallFields, OpenAIFields
from serve_app.ingress.prompt_prefix import MAX_BYTES, prefix_hashes

PROMPT = ("tools", "system", "instructions", "prompt", "prompts", "messages", "input")
"""Fields of which a prompt is made, in the order that chat templates put them in."""


class RoutingKey(NamedTuple):
    """The part of a request that the choice of a replica depends on.

    Attributes:
        prefix: Hashes of the beginning of its prompt.
        tokens: About how many tokens it takes up.
    """

    prefix: tuple[int, ...]
    tokens: int


NO_KEY = RoutingKey((), EXPECTED_OUTPUT)
"""The key of a request whose body has no prompt that could be looked into."""


def openai_key(content: JSONBody, fields: OpenAIFields, size: int) -> RoutingKey:
    """Return the key of a request of OpenAI's or Anthropic's API.

    Args:
        content: Its body.
        fields: The fields of its body that have been read.
        size: Bytes of its body.
    """
    return RoutingKey(_prefix(content), estimate_tokens(size, max(1, fields.n or 1), fields.limit))


def call_key(content: JSONBody, fields: CallFields, size: int) -> RoutingKey:
    """Return the key of a `/generate` call; its arguments are those of `openai_key`."""
    answers = content.count("prompts", 0) or content.count("messages", 0) or 1
    return RoutingKey(_prefix(content), estimate_tokens(size, answers, fields.max_tokens))


def _prefix(content: JSONBody) -> tuple[int, ...]:
    return prefix_hashes(content.text(PROMPT, MAX_BYTES))
