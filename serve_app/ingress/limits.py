"""Limits on how much one request may ask for, checked before it reaches an engine."""

import re
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, Field

from serve_app.api.errors import ANTHROPIC, RequestError
from serve_app.api.protocol import MAX_NAME, check_count, parse_body
from serve_app.api.routes import CLASSIFY, EMBEDDINGS, GENERATE, MOVED, SPEECH
from serve_app.api.scheduling import SchedulingFields, ServiceTier
from serve_app.api.shapes import CHECKED, check_items
from serve_app.ingress.body import JSONBody
from serve_app.ingress.routing import PROCESS
from serve_app.ingress.value_count import check_values, count_values, is_within
from serve_app.settings.ingress import IngressSettings

TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
ANSWERS = ("n", "best_of")
PROMPT_LISTS = (
    "prompt",
    "prompt_embeds",
    "input",
    "documents",
    "queries",
    "items",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
)
MESSAGE_LISTS = (*PROMPT_LISTS, "query", "messages", "system", "previous_input_messages", "tools")
CHAT_BATCH = "/v1/chat/completions/batch"
LENGTHS = {
    **dict.fromkeys(("/v1/chat/completions", CHAT_BATCH), ("max_completion_tokens", "max_tokens")),
    **dict.fromkeys(("/v1/completions", "/v1/messages"), ("max_tokens",)),
    "/v1/responses": ("max_output_tokens",),
    **dict.fromkeys(SPEECH, ("max_completion_tokens",)),
}
"""Fields in which a route reads the most tokens of an answer; the first one that is stated counts."""

FORM = {"model", "n", *LENGTHS[SPEECH[0]]}
"""Fields that are read of a form with a file."""

CHAT_LISTS = {CHAT_BATCH, EMBEDDINGS}
"""Routes whose `messages` may be a list of chats."""

NUMBER_LISTS = {
    "/v1/completions": {"prompt"},
    "/detokenize": {"tokens"},
    PROCESS: {"records"},
    **{path: {"input"} for path in (EMBEDDINGS, *CLASSIFY)},
}
"""Fields in which a route takes prompts in tokens, or vectors: millions of numbers may stand there."""

CONTENT = {
    *MESSAGE_LISTS,
    *("prompts", "records", "tokens", "instruction", "instructions", "suffix", "chat_template_kwargs"),
    *("response_format", "structured_outputs", "text", "output_config", "tool_choice"),
}
"""Fields that make up a prompt, or the form of its answer. Work on them has bounds of its own: the context,
`max_messages`, the time for a grammar."""

OPTIONS = 10
"""All other fields together may have this part of `max_values`: a field that nothing reads is parsed too."""

OPTION_BYTES = 1 << 18
"""Bytes that all other fields may have together."""

_FORM = re.compile(rb"[\r\n]*--")
"""The beginning of a form with files."""


class CallFields(SchedulingFields):
    """Fields of a `/generate` or `/process` call that the Ingress reads."""

    model: str | None = None
    max_tokens: Annotated[int, Field(strict=True)] | None = None


class OpenAIFields(BaseModel):
    """Fields of an OpenAI request that the Ingress reads, as leniently as vLLM reads them."""

    model: str | None = None
    service_tier: ServiceTier | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    background: Any = None

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer, as vLLM reads the request; None: it states none."""
        return next((value for name in TOKENS if (value := getattr(self, name)) is not None), None)


def read_json(body: bytes, limits: IngressSettings) -> JSONBody:
    """Return a body, of which single fields can be read.

    Raises:
        RequestError: 400, it is not a JSON object, or has more values than `limits` allow.
    """
    check_values(body, limits.max_values)
    return JSONBody(body)


def read_call(content: JSONBody, limits: IngressSettings, *lists: str) -> CallFields:
    """Return the fields of a `/generate` or `/process` call, whose prompts or records are in `lists`.

    Raises:
        RequestError: 400, the call asks for more than `limits` allow, or a field is wrong.
    """
    _check_fields(content, PROCESS if "records" in lists else GENERATE, limits)
    fields = parse_body(CallFields, content.values(*CallFields.model_fields))
    for name in lists:
        _check_list(content, name, limits)
    for name in content.among(["messages"] if "messages" in lists else []):
        _check_parts(content, name, limits)
        check_items(name, content.text([name], limits.max_body_bytes))
    if limits.max_tokens is not None:
        _check_most("max_tokens", fields.max_tokens, limits.max_tokens, "ingress.max_tokens")
    return fields


def read_openai(content: JSONBody, path: str, limits: IngressSettings) -> OpenAIFields:
    """Return the fields of a request of OpenAI's or Anthropic's API.

    A length that the route doesn't read is left out: vLLM ignores it too.

    Raises:
        RequestError: 400, the request asks for more than `limits` allow, or a field is wrong.
    """
    _check_fields(content, path, limits)
    unread = {*TOKENS}.difference(LENGTHS.get(path, ()))
    values = content.values(*(name for name in OpenAIFields.model_fields if name not in unread))
    if path.startswith(ANTHROPIC) and values.get("service_tier") == "standard_only":
        values["service_tier"] = "default"
    fields = parse_body(OpenAIFields, values)
    if fields.background not in (None, False):
        message = "background: not served; the answer would outlive its client. Use a batch run instead"
        raise RequestError(400, "invalid_request_error", message, param="background")
    _check_amounts(fields, limits)
    for name in content.among(prompt_lists(path)):
        # An empty list is refused by vLLM, in its own words.
        if content.count(name, limits.max_prompts) != 0:
            _check_list(content, name, limits)
    for name in content.among(MESSAGE_LISTS):
        _check_parts(content, name, limits)
    for name in content.among(CHECKED):
        check_items(name, content.text([name], limits.max_body_bytes))
    return fields


def read_form(values: dict[str, str], limits: IngressSettings) -> OpenAIFields:
    """Return the fields of a form with a file.

    Args:
        values: The fields of the form that the Ingress reads.
        limits: The limits of the Ingress.

    Raises:
        RequestError: 400, the request asks for more than `limits` allow, or a field is wrong.
    """
    fields = parse_body(OpenAIFields, {name: value for name, value in values.items() if value})
    _check_amounts(fields, limits)
    return fields


def check_unread(body: bytes, limits: IngressSettings) -> None:
    """Check a body that is relayed unread, since its type is not JSON. An Engine may parse it all the same.

    Raises:
        RequestError: 400, it is no form, and has more values than `limits` allow, or isn't UTF-8.
    """
    if _FORM.match(body):
        # No parser of JSON gets past this.
        return
    if b"\0" in body:
        # JSON in UTF-16 or UTF-32, of which the values can't be counted.
        raise RequestError(400, "invalid_request_error", "The body is neither a form nor JSON in UTF-8")
    check_values(body, limits.max_values, numbers=1)


def prompt_lists(path: str) -> tuple[str, ...]:
    """Return the fields of a route whose items are prompts of their own, or texts of several prompts."""
    return (*PROMPT_LISTS, "messages") if path in CHAT_LISTS else PROMPT_LISTS


def _check_fields(content: JSONBody, path: str, limits: IngressSettings) -> None:
    """Check the values of the fields in which numbers are no prompt, and the size of the options."""
    numbers: Collection[str] = NUMBER_LISTS.get(MOVED.get(path, path), ())
    check_values(content.part(CONTENT.difference(numbers)), limits.max_values, numbers=1)
    options = content.parts_beside(CONTENT)
    most = limits.max_values // OPTIONS
    if sum(map(len, options.values())) <= OPTION_BYTES and is_within(
        b",".join(options.values()), most, numbers=1
    ):
        return
    name = max(options, key=lambda name: (count_values(options[name]), len(options[name])))[:MAX_NAME]
    message = (
        f"{name}: the largest of the fields beside the prompt, which have more than {most} values or "
        f"{OPTION_BYTES} bytes together; {most} is a tenth of ingress.max_values"
    )
    raise RequestError(400, "invalid_request_error", message, param=name)


def _check_amounts(fields: OpenAIFields, limits: IngressSettings) -> None:
    for name in ANSWERS:
        _check_most(name, getattr(fields, name), limits.max_n, "ingress.max_n")
    if limits.max_tokens is not None:
        for name in TOKENS:
            _check_most(name, getattr(fields, name), limits.max_tokens, "ingress.max_tokens")


def _check_list(content: JSONBody, name: str, limits: IngressSettings) -> None:
    if (count := content.count(name, limits.max_prompts)) is not None:
        check_count(name, count, limits.max_prompts)


def _check_parts(content: JSONBody, name: str, limits: IngressSettings) -> None:
    count = content.count_parts(name, limits.max_messages)
    _check_most(name, count, limits.max_messages, "ingress.max_messages")


def _check_most(field: str, value: int | None, most: int, setting: str) -> None:
    if value is not None and value > most:
        message = f"{field}: {value} is more than the limit of {most} ({setting})"
        raise RequestError(400, "invalid_request_error", message, param=field)
