"""The most tokens that a request asks for, from its body."""

import re

from serve_app.api.routes import POOLING, SCORE
from serve_app.api.token_bound import NOTHING, TEMPLATE_TOKENS, TokenDemand
from serve_app.ingress.body import JSONBody
from serve_app.ingress.limits import CallFields, OpenAIFields, prompt_lists
from serve_app.relay.events import RESPONSES
from serve_app.settings.ingress import IngressSettings

MEDIA = re.compile(
    rb'"(image|image_url|image_embeds|input_image|input_audio|audio_url|audio_embeds|video|video_url|'
    rb'video_embeds|prompt_embeds|previous_response_id)"'
)
"""Names in bodies whose prompts have other tokens than those of their bytes."""

ESCAPED = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
"""Escape of a lower-case letter or of `_`: no encoder of JSON writes one, and it may hide a name of `MEDIA`,
as in `image\\u005furl`."""

WITHOUT_MODEL = {
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/messages/count_tokens",
}
COUNT = 1 << 30
"""More than any list has: every list is counted."""


def openai_demand(
    content: JSONBody, fields: OpenAIFields, path: str, body: bytes, limits: IngressSettings
) -> TokenDemand:
    """Return the demand of a request of OpenAI's or Anthropic's API.

    Args:
        content: Its body, which has been looked into.
        fields: The fields of the body that have been read.
        path: Its route.
        body: The text of the body.
        limits: The limits of the Ingress.
    """
    if path in WITHOUT_MODEL:
        return NOTHING
    prompts = 0
    # The items of the `input` of a response are messages of one conversation.
    for name in () if path == RESPONSES else content.among(prompt_lists(path)):
        # The lists of two fields may be combined.
        if (count := content.count(name, 0) or 1) > 1:
            prompts += count
    prompts = prompts or 1
    # Pairs put the same text into several prompts.
    prompt: int | None = (len(body) * prompts if path in SCORE else len(body)) + prompts * TEMPLATE_TOKENS
    if MEDIA.search(body) or ESCAPED.search(body):
        prompt = None
    if path in POOLING:
        return TokenDemand(prompt, prompts, output=0)
    return TokenDemand(prompt, prompts, _answers(fields), _output(fields, limits))


def form_demand(fields: OpenAIFields, limits: IngressSettings) -> TokenDemand:
    """Return the demand of a form with a file, whose bytes say nothing about its tokens.

    Args:
        fields: The fields of the form that have been read.
        limits: The limits of the Ingress.
    """
    return TokenDemand(None, 1, _answers(fields), _output(fields, limits))


def _answers(fields: OpenAIFields) -> int:
    return max(1, fields.n or 1, fields.best_of or 1)


def _output(fields: OpenAIFields, limits: IngressSettings) -> int | None:
    if fields.limit is None:
        return limits.max_tokens
    # vLLM makes a token for a completion that only echoes its prompt, too.
    return max(1, fields.limit)


def call_demand(content: JSONBody, fields: CallFields, size: int, limits: IngressSettings) -> TokenDemand:
    """Return the demand of a `/generate` call.

    Args:
        content: Its body, which has been looked into.
        fields: The fields of the body that have been read.
        size: Bytes of the body.
        limits: The limits of the Ingress.
    """
    prompts = content.count("prompts", 0) or content.count("messages", 0) or 1
    output = fields.max_tokens if fields.max_tokens is not None else limits.max_tokens
    return TokenDemand(size + prompts * TEMPLATE_TOKENS, prompts, 1, output)
