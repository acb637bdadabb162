"""Facts of a request: one inspection of its body gives its limits, routing key and a bound on its tokens."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Annotated, Any, Protocol, TypeVar
from zlib import crc32

import msgspec
from pydantic import BaseModel, Field
from pydantic_core import from_json, to_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.api.errors import ANTHROPIC, RequestError
from serve_app.api.protocol import MAX_NAME, check_count, parse_body, without_nulls
from serve_app.api.routes import (
    CHAT_BATCH,
    CLASSIFY,
    EMBEDDINGS,
    GENERATE,
    MOVED,
    POOLING,
    PROCESS,
    RESPONSES,
    SCORE,
    SPEECH,
    TOKENIZING,
)
from serve_app.api.scheduling import SchedulingFields, ServiceTier
from serve_app.api.shapes import CHECKED, check_items

T = TypeVar("T")

TEMPLATE_TOKENS = 512
"""Most tokens that a chat template adds to a prompt: its own system prompt, hints on tools."""

UNKNOWN_CONTEXT = 131_072
"""Context that is assumed for a model whose context is not known yet, in tokens."""

BYTES_PER_TOKEN = 4
"""Bytes of text per token, about: English with a large vocabulary."""

EXPECTED_OUTPUT = 256
"""Most tokens of an answer that an estimate counts: the limit of a request is mostly far above its answer."""


class PickledByName:
    """Base of dataclasses that travel between replicas, which may run different versions of the code.

    A pickle has the names of the fields: unknown fields are ignored, and missing fields have their defaults.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the fields by name; a frozen slotted dataclass would be pickled by position."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return _unpickle, (type(self), values)


def _unpickle(kind: type[T], values: Mapping[str, Any]) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(PickledByName):
    """Facts that the body of a request states, before any token is counted.

    Attributes:
        size: Bytes of the body; 0 for a call without one.
        prompt: Bound on the tokens of all prompts together: a byte-level tokenizer makes no more tokens than
            there are bytes. None: the bytes give no bound, as with an image behind a URL.
        prompts: Prompts that the engine runs, each separately.
        answers: Answers to each prompt, which start together.
        output: Most tokens of each answer, as the request or the limit of the service states it; None: the
            rest of the context; 0: the route makes no tokens.
        values: Answers, and logprobs of their tokens, that vLLM makes for the whole answer at least.
        runs: Whether the route runs the model at all; `/tokenize` does not.
        grammar: Whether the body names a field that may hold a grammar.
        stream: Whether the request asks for a stream.
        model: The model that the body names; None: the body names no model.
        service_tier: The tier that the body states.
        tenant: The tenant that the body states.
        queue_timeout_s: Seconds that the request may wait for its start, as the body states it.
        prefix: Hashes of the beginning of the prompt, by which a replica is chosen; see `prefix_hashes`.
        tokens: Estimate of the tokens of prompts and answers, by which a replica is chosen.
    """

    size: int = 0
    prompt: int | None = 0
    prompts: int = 1
    answers: int = 1
    output: int | None = None
    values: int = 0
    runs: bool = True
    grammar: bool = False
    stream: bool = False
    model: str | None = None
    service_tier: ServiceTier | None = None
    tenant: str | None = None
    queue_timeout_s: float | None = None
    prefix: tuple[int, ...] = ()
    tokens: int = EXPECTED_OUTPUT

    def most(self, context: int | None) -> int:
        """Return the most tokens that the request can take.

        Args:
            context: Context of the model, in tokens; None: not known.
        """
        if not self.runs:
            return 0
        context = context or UNKNOWN_CONTEXT
        prompt = self.prompts * context
        if self.prompt is not None:
            prompt = min(prompt, self.prompt)
        output = context if self.output is None else min(self.output, context)
        most = prompt + self.prompts * self.answers * max(0, output)
        # A prompt and its answer share the context; several answers share the prompt.
        return min(most, self.prompts * self.answers * context)

    @property
    def scheduling(self) -> SchedulingFields:
        """The scheduling that the body states."""
        return SchedulingFields(
            service_tier=self.service_tier, tenant=self.tenant, queue_timeout_s=self.queue_timeout_s
        )

    def cached_for(self, adapter: str, tenant: str) -> "Facts":
        """Return the facts with a prefix that matches only prompts in the same part of the prefix cache.

        Args:
            adapter: Id of the adapter; empty: the base model.
            tenant: The tenant; empty: tenants share the cache.
        """
        if not (adapter or tenant):
            return self
        salt = crc32(f"{adapter}\n{tenant}".encode())
        return replace(self, prefix=tuple(number ^ salt for number in self.prefix))


NOTHING = Facts(prompt=0, output=0, runs=False)
"""Facts of a request that runs no model."""

UNKNOWN = Facts(prompt=None, grammar=True)
"""Facts of a request whose body hasn't been inspected."""


class RequestLimits(Protocol):
    """Limits of a request, from the settings of the Ingress."""

    max_prompts: int
    max_tokens: int | None
    max_n: int
    max_messages: int
    max_values: int


# The fields of the routes

LENGTHS = {
    **dict.fromkeys(("/v1/chat/completions", CHAT_BATCH), ("max_completion_tokens", "max_tokens")),
    **dict.fromkeys(("/v1/completions", "/v1/messages"), ("max_tokens",)),
    RESPONSES: ("max_output_tokens",),
    **dict.fromkeys(SPEECH, ("max_completion_tokens",)),
}
"""Fields of a route with the most tokens of an answer; the first field that is stated counts."""

WITHOUT_MODEL = {*TOKENIZING, "/v1/messages/count_tokens"}
"""Routes that run no model."""

CALLS = {GENERATE: ("prompts", "messages"), PROCESS: ("records",)}
"""Fields of the routes outside vLLM whose items are prompts or records."""

PROMPT_LISTS = (
    *("prompt", "prompt_embeds", "input", "documents", "queries", "items"),
    *("text_1", "text_2", "data_1", "data_2"),
)
"""Fields of vLLM's routes whose items are separate prompts, or texts of several prompts."""

CHATS = {"/v1/chat/completions", CHAT_BATCH}

CHAT_LISTS = {CHAT_BATCH, EMBEDDINGS}
"""Routes whose `messages` may be a list of chats, each a prompt."""

MESSAGE_LISTS = (*PROMPT_LISTS, "query", "messages", "system", "previous_input_messages", "tools")
"""Fields of vLLM's routes that may be messages, or lists of messages."""

NUMBER_LISTS = {
    "/v1/completions": {"prompt"},
    "/detokenize": {"tokens"},
    PROCESS: {"records"},
    **{path: {"input"} for path in (EMBEDDINGS, *CLASSIFY)},
}
"""Fields in which a route takes prompts in tokens, or vectors, with up to millions of numbers."""

GRAMMARS = ("response_format", "text", "output_config", "structured_outputs", "tools", "tool_choice")
"""Fields that may hold a grammar, or control how a grammar is used."""

CONTENT = {
    *MESSAGE_LISTS,
    *GRAMMARS,
    *("prompts", "records", "tokens", "instruction", "instructions", "suffix", "chat_template_kwargs"),
}
"""Fields that make up a prompt, or the form of its answer. Other bounds limit the work on them: the context,
`max_messages`, the time for a grammar."""

MEDIA = (
    *("image", "image_url", "image_embeds", "input_image", "input_audio", "audio_url", "audio_embeds"),
    *("image_pil", "video", "video_url", "video_embeds", "prompt_embeds"),
)
"""Keys and types of the parts of messages whose tokens don't come from the bytes of the body."""

BEYOND = ("prompt_embeds", "previous_response_id", "padding")
"""Fields that give a prompt more tokens than the bytes of the body."""

TEMPLATE_ARGUMENTS = {
    *("self", "model_config", "tokenizer", "conversation", "conversations", "messages", "chat_template"),
    *("tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "processor_kwargs"),
}
"""Arguments of the functions between vLLM and a chat template: a value of such a name reaches a function, and
not the template."""

PREFIX = ("cache_salt", "tools", "system", "instructions", "prompt", "prompts", "messages", "input")
"""Fields that make up a prompt, in the order of chat templates, behind the salt that separates caches."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escape of half a character, which msgspec doesn't check in a value that it doesn't read."""

# Bounds

NUMBERS = 10
"""Numbers in lists that count as one other value in fields for prompts in tokens: a million numbers hold an
Engine's event loop for a tenth of a second."""

OPTIONS = 10
"""All fields beside `CONTENT` together may have `max_values` divided by this number: unused fields are
parsed, too."""

OPTION_BYTES = 1 << 18
"""Most bytes of all fields beside `CONTENT` together."""

MAX_TEMPLATE_BYTES = 16_384
"""Most bytes of `chat_template_kwargs`: a template may repeat a value for each message."""

MAX_TEMPLATE_NUMBER = 1_000_000
"""Largest number in `chat_template_kwargs`: a template may repeat a text as often."""

_MOST_VALUE = 4_096
"""Most bytes of a value that is read: a name, a number, a tier."""

_DEEPEST = 4
"""Most levels of lists around a message: chats, messages, and two levels that no route has."""

_MOST_PARTS = 2_000
"""Most parts of a form; vLLM's application refuses a form with more fields or files."""

_MOST_PARAMETERS = 32
"""Most parameters in the header of a part: its name and its file's name, which may have semicolons. Thousands
of parameters in each of thousands of parts take the parser seconds."""

_MOST_BOUNDARY = 70
"""Most bytes of the boundary of a form, by RFC 2046."""


class _CallFields(SchedulingFields):
    """Inspected fields of `/generate` and `/process`, read as strictly as in the Engine."""

    model: str | None = None
    max_tokens: Annotated[int, Field(strict=True)] | None = None


class _OpenAIFields(BaseModel):
    """Inspected fields of vLLM's routes, read as leniently as in vLLM."""

    model: str | None = None
    service_tier: ServiceTier | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    background: Any = None


_FALSE = (b"null", b"false", b"0", b"0.0", b"f", b"n", b"no", b"off")
_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_FORM_FIELDS = ("model", "n", "stream", *LENGTHS[SPEECH[0]])


def inspect(
    body: bytes, path: str, limits: RequestLimits, *, content_type: str = "application/json", model: str = ""
) -> Facts:
    """Return the facts of a request from one look at its body.

    A parser makes an object of each value; this function only splits the fields of the outer object, and
    decodes the relevant fields. Its counts are never below the counts of vLLM's application for the same
    body.

    Args:
        body: The body.
        path: The route.
        limits: The limits of a request.
        content_type: The header `Content-Type`; empty: no header.
        model: The model that the query string names, used for a form without a model.

    Raises:
        RequestError: 400, the body asks for more than `limits` allow, it is neither a JSON object nor a form,
            or a field is wrong.
    """
    if _is_json(body, path, content_type):
        return _inspect_json(body, path, limits)
    return _inspect_form(body, content_type, model, path, limits)


def read(
    body: bytes, path: str, limits: RequestLimits, *, content_type: str = "application/json", model: str = ""
) -> tuple[Facts, bytes]:
    """Return the facts of a request, and its body with values that each route takes.

    A field that is null counts as not set, so the body has it no more: vLLM refuses null in some fields, and
    in others reads a value that is not the default. vLLM doesn't know the tier "fast", the newer name of
    "priority".

    Args:
        body: The body.
        path: The route.
        limits: The limits of a request.
        content_type: The header `Content-Type`; empty: no header.
        model: The model that the query string names, used for a form without a model.

    Raises:
        RequestError: See `inspect`.
    """
    facts = inspect(body, path, limits, content_type=content_type, model=model)
    if _is_json(body, path, content_type):
        body = without_nulls(body)
    if facts.service_tier == "fast":
        # Of two fields with one name, the last counts.
        body = body.rstrip(b" \t\r\n").removesuffix(b"}") + b',"service_tier":"priority"}'
    return facts, body


def _is_json(body: bytes, path: str, content_type: str) -> bool:
    kind = (content_type or "json").partition(";")[0].lower()
    # A function reads a body of any type as JSON, for embeddings as for its other calls.
    return path in CALLS or (bool(body) and ("json" in kind or path == EMBEDDINGS))


def facts_of_call(request: Any, max_tokens: int | None = None) -> Facts:
    """Return the facts of a `generate` call over a handle, whatever its argument is.

    Args:
        request: A `GenerateRequest`, or an object with its fields, not validated.
        max_tokens: The config's limit for calls without a limit.
    """

    def value(name: str) -> Any:
        return request.get(name) if isinstance(request, dict) else getattr(request, name, None)

    # A NumPy array, such as a column of a dataset, has no truth value.
    lists = [found for name in ("prompts", "messages") if isinstance(found := value(name), list)]
    prompts = next(filter(None, lists), None)
    limit = value("max_tokens")
    output = limit if isinstance(limit, int) else max_tokens
    if prompts is None:
        return replace(UNKNOWN, output=output)
    count, size = len(prompts), sum(map(_text_bytes, prompts))
    return Facts(
        size=size,
        prompt=size + count * TEMPLATE_TOKENS,
        prompts=count,
        output=output,
        tokens=_estimate(size, count, output),
    )


def _text_bytes(prompt: Any) -> int:
    text = prompt if isinstance(prompt, str) else repr(prompt)
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _estimate(size: int, answers: int, output: int | None) -> int:
    """Return an estimate of the tokens of a request.

    Args:
        size: Bytes of the text.
        answers: Answers to all prompts together.
        output: Most tokens of each answer; None: not stated.
    """
    expected = EXPECTED_OUTPUT if output is None else max(0, min(output, EXPECTED_OUTPUT))
    return size // BYTES_PER_TOKEN + answers * expected


# JSON


def _inspect_json(body: bytes, path: str, limits: RequestLimits) -> Facts:
    content = _checked_fields(body, path, limits)
    if path == PROCESS:
        # A function has no tokens: its calls weigh the same, and their replicas are chosen by load alone.
        return replace(_read_call(content, path, limits), size=len(body), prompt=0, output=0, runs=False)
    read = _read_call if path in CALLS else _read_openai
    facts = read(content, path, limits)
    size = len(body)
    # Pairs put the same text into several prompts.
    prompt = (size * facts.prompts if path in SCORE else size) + facts.prompts * TEMPLATE_TOKENS
    unknown = path != GENERATE and _has_more(content)
    return replace(
        facts,
        size=size,
        prompt=0 if not facts.runs else None if unknown else prompt,
        prefix=_prefix(content),
        tokens=_estimate(size, facts.prompts * facts.answers, facts.output),
    )


def _read_call(content: dict[str, msgspec.Raw], path: str, limits: RequestLimits) -> Facts:
    values = parse_body(_CallFields, _values(content, _CallFields.model_fields))
    prompts = 0
    for name in CALLS[path]:
        if name in content and (count := _length(content[name])) is not None:
            check_count(name, count, limits.max_prompts)
            prompts = prompts or count
    if path == GENERATE and "messages" in content:
        _check_parts("messages", content["messages"], limits)
    _check_most("max_tokens", values.max_tokens, limits.max_tokens, "ingress.max_tokens")
    output = values.max_tokens if values.max_tokens is not None else limits.max_tokens
    return Facts(
        prompts=prompts or 1,
        output=output,
        model=values.model,
        service_tier=values.service_tier,
        tenant=values.tenant,
        queue_timeout_s=values.queue_timeout_s,
    )


def _read_openai(content: dict[str, msgspec.Raw], path: str, limits: RequestLimits) -> Facts:
    # A length that the route doesn't read is left out: vLLM ignores it too.
    unread = set(_TOKENS).difference(LENGTHS.get(path, ()))
    values = _values(content, [name for name in _OpenAIFields.model_fields if name not in unread])
    if path.startswith(ANTHROPIC) and values.get("service_tier") == "standard_only":
        values["service_tier"] = "default"
    facts = _facts_of_fields(values, path, limits)
    prompts = 0
    lists = (*PROMPT_LISTS, "messages") if path in CHAT_LISTS else PROMPT_LISTS
    for name in lists:
        # vLLM itself refuses an empty list.
        if name in content and (count := _length(content[name])):
            check_count(name, count, limits.max_prompts)
            # The lists of two fields may be combined.
            prompts += count if count > 1 else 0
    for name in MESSAGE_LISTS:
        if name in content:
            _check_parts(name, content[name], limits)
    for name in CHECKED:
        if name in content:
            check_items(name, bytes(content[name]))
    if "chat_template_kwargs" in content:
        _check_template(bytes(content["chat_template_kwargs"]))
    # The items of the `input` of a response are messages of one conversation.
    prompts = 1 if path == RESPONSES else prompts or 1
    return replace(
        facts,
        prompts=prompts,
        values=_answer_values(content, path, prompts) if facts.output != 0 else 0,
        stream=_is_true(content.get("stream")),
        grammar=any(name in content for name in GRAMMARS),
    )


def _facts_of_fields(values: dict[str, Any], path: str, limits: RequestLimits) -> Facts:
    """Return the facts from the fields of a vLLM route, without the facts of its prompts."""
    asked = parse_body(_OpenAIFields, values)
    if asked.background not in (None, False):
        message = "background: not served; the answer would outlive its client. Use a batch run instead"
        raise _refused(message, "background")
    for name in ("n", "best_of"):
        _check_most(name, getattr(asked, name), limits.max_n, "ingress.max_n")
    for name in _TOKENS:
        _check_most(name, getattr(asked, name), limits.max_tokens, "ingress.max_tokens")
    if path in WITHOUT_MODEL or path in POOLING:
        output: int | None = 0
    else:
        stated = next((value for name in _TOKENS if (value := getattr(asked, name)) is not None), None)
        # vLLM makes a token for a completion that only echoes its prompt, too.
        output = limits.max_tokens if stated is None else max(1, stated)
    return Facts(
        answers=1 if output == 0 else max(1, asked.n or 1, asked.best_of or 1),
        output=output,
        runs=path not in WITHOUT_MODEL,
        model=asked.model,
        service_tier=asked.service_tier,
    )


def _checked_fields(body: bytes, path: str, limits: RequestLimits) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object, each as text, once the count of its values is checked."""
    most = limits.max_values
    many = not _is_within(body, most, numbers=1)
    if many:
        _check_values(body, most)
    content = _split(body)
    if many:
        # In these fields numbers are no prompt, and as costly as any other value.
        numbers: Collection[str] = NUMBER_LISTS.get(MOVED.get(path, path), ())
        _check_values(_joined(content, CONTENT.difference(numbers)), most, numbers=1)
    options = content.keys() - CONTENT
    size = sum(len(name.encode()) + len(content[name]) for name in options)
    most //= OPTIONS
    if size > OPTION_BYTES or not _is_within(_joined(content, options), most, numbers=1):
        name = max(
            options, key=lambda name: (count_values(bytes(content[name])), len(name), len(content[name]))
        )
        message = (
            f"{name[:MAX_NAME]}: the largest of the fields beside the prompt, which have more than {most} "
            f"values or {OPTION_BYTES} bytes together; {most} is a tenth of ingress.max_values"
        )
        raise _refused(message, name[:MAX_NAME])
    return content


def _split(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object, each as text."""
    if _is_plain(body):
        try:
            return _OBJECT.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            # The text is invalid, or has values outside strict JSON, such as NaN.
            pass
    try:
        content = from_json(body)
    except ValueError as error:
        raise _refused(f"The body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise _refused("The body must be a JSON object")
    return _OBJECT.decode(to_json(content, inf_nan_mode="strings"))


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"")


_MESSAGE = msgspec.json.Decoder(_Message)
_LIST_START = re.compile(rb"\[\s*([^\s\-0-9])")
"""The beginning of a list, except a list of numbers, which is a single prompt in tokens."""


def _is_plain(body: bytes) -> bool:
    """Return whether values that aren't decoded are safe: the text is UTF-8, without escaped surrogates."""
    # Search for one byte first: it takes a tenth of the time.
    if b"\\" in body and _SURROGATE.search(body):
        return False
    try:
        return body.isascii() or bool(body.decode())
    except UnicodeDecodeError:
        return False


def _values(content: dict[str, msgspec.Raw], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the named fields that the body has."""
    found = {}
    for name in names:
        if name in content:
            _check_size(name, len(content[name]))
            try:
                found[name] = msgspec.json.decode(content[name])
            except (ValueError, msgspec.MsgspecError, RecursionError):
                # For example, a number with thousands of digits, or a list with thousands of levels.
                raise _refused(f"{name}: is no value that can be read", name) from None
    return found


def _length(text: msgspec.Raw) -> int | None:
    """Return the length of a list; None: the text is no list, or a list of numbers, a single prompt."""
    return len(_LIST.decode(text)) if _LIST_START.match(text) else None


def _check_parts(name: str, text: msgspec.Raw, limits: RequestLimits) -> None:
    """Check the messages in a list, or a list of lists, and the parts of their contents."""
    most = limits.max_messages
    raw = bytes(text)
    # Valid messages and parts are objects or texts, and most bodies have few of both.
    if raw.count(b"{") + raw.count(b'"') // 2 <= most:
        return
    try:
        count = _count_parts(raw, _DEEPEST)
    except (RecursionError, msgspec.MsgspecError):
        raise _refused(f"{name}: nested too deeply, or no list of messages", name) from None
    _check_most(name, count, most, "ingress.max_messages")


def _count_parts(text: bytes, levels: int) -> int:
    if text.startswith(b"{"):
        content = bytes(_MESSAGE.decode(text).content)
        return 1 + (len(_LIST.decode(content)) if _LIST_START.match(content) else 0)
    if not _LIST_START.match(text):
        return 0
    if not levels:
        raise RecursionError
    return sum(_count_parts(bytes(item), levels - 1) for item in _LIST.decode(text))


_Part: Any = msgspec.defstruct(
    "_Part", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in ("type", "content", "output", *MEDIA)]
)
_PART = msgspec.json.Decoder(_Part)

_MAY_BE_MEDIA = re.compile(rb'"(?:%s)"|\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])' % "|".join(MEDIA).encode())
"""A name of `MEDIA`, or a letter of such a name as an escape."""


def _has_more(content: dict[str, msgspec.Raw]) -> bool:
    """Return whether a prompt may have more tokens than the bytes of its fields."""
    if any(bytes(content.get(name, b"null")) not in (b"null", b'"do_not_pad"') for name in BEYOND):
        return True
    return any(
        name in content and _MAY_BE_MEDIA.search(content[name]) and _has_media(bytes(content[name]), _DEEPEST)
        for name in MESSAGE_LISTS
        if name != "tools"
    )


def _has_media(text: bytes, levels: int) -> bool:
    """Return whether the parts of messages have media, as a key or as their type."""
    try:
        if text.startswith(b"{"):
            part = _PART.decode(text)
            if any(len(getattr(part, name)) for name in MEDIA):
                return True
            if len(part.type) and msgspec.json.decode(part.type) in MEDIA:
                return True
            return any(_has_media(bytes(inner), levels) for inner in (part.content, part.output))
        if not _LIST_START.match(text):
            return False
        return not levels or any(_has_media(bytes(item), levels - 1) for item in _LIST.decode(text))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return True


def _answer_values(content: dict[str, msgspec.Raw], path: str, prompts: int) -> int:
    """Return the answers, and the logprobs of their tokens, that a route makes for the whole answer at least.

    The engine counts the others: those of prompts, and of answers without a stated length.
    """
    answers = prompts * max(1, _number(content, "n"))
    length = next((_number(content, name) for name in LENGTHS.get(path, ()) if _states(content, name)), 0)
    if _is_true(content.get("stream")) or not _states(content, "logprobs") or path == RESPONSES:
        return answers
    each = max(0, _number(content, "logprobs"))
    if path in CHATS:
        each = max(0, _number(content, "top_logprobs")) if each else -1
    return answers * (1 + max(0, length) * (1 + each))


def _states(content: dict[str, msgspec.Raw], name: str) -> bool:
    return bytes(content.get(name, b"null")) != b"null"


def _number(content: dict[str, msgspec.Raw], name: str) -> int:
    """Return a number or a flag that a body states; 0: vLLM reads another value, or refuses it."""
    value = _values(content, (name,)).get(name)
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else 0


def _check_template(text: bytes) -> None:
    """Check the variables of a chat template that a request gives."""
    name = "chat_template_kwargs"
    if len(text) > MAX_TEMPLATE_BYTES:
        message = f"{name}: has {len(text)} bytes; at most {MAX_TEMPLATE_BYTES} are allowed"
        raise _refused(message, name)
    try:
        variables = msgspec.json.decode(text)
        if not isinstance(variables, dict):
            # vLLM refuses it.
            return
        for key in variables:
            if key in TEMPLATE_ARGUMENTS or key.endswith(("_token", "special_tokens")):
                kind = "an argument of a function" if key in TEMPLATE_ARGUMENTS else "a token of the model"
                message = f"{name}.{key[:MAX_NAME]}: is {kind}, and no variable of the chat template; "
                own = key in ("tools", "documents", "add_generation_prompt", "continue_final_message")
                raise _refused(message + (f"use the field {key}" if own else "leave it out"), name)
        if (number := _largest(variables)) > MAX_TEMPLATE_NUMBER:
            message = f"{name}: has the number {number:g}; at most {MAX_TEMPLATE_NUMBER} is allowed"
            raise _refused(message, name)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        raise _refused(f"{name}: is no value that can be read", name) from None


def _largest(value: Any) -> float:
    """Return the largest number in a value, without its sign."""
    if isinstance(value, dict | list):
        return max(map(_largest, value.values() if isinstance(value, dict) else value), default=0)
    return abs(value) if isinstance(value, int | float) else 0


def _is_true(text: bytes | None) -> bool:
    """Return whether vLLM may read the text of a field as true; None: there is no such field."""
    return text is not None and bytes(text).strip(b'" ').lower() not in _FALSE


# Values

_NUMBERS = b"-+.eE0123456789 \t\r\n"
_LIST_OF_NUMBERS = re.compile(rb"\[,+\]")


def count_values(text: bytes) -> int:
    """Return a bound on the values of a JSON text."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _joined(content: dict[str, msgspec.Raw], names: Collection[str]) -> bytes:
    """Return a text with as many values as the named fields."""
    return b",".join([b"", *(text for name, text in content.items() if name in names)])


def _check_values(text: bytes, most: int, numbers: int = NUMBERS) -> None:
    if not _is_within(text, most, numbers):
        lists = f", or more than {numbers * most} numbers in lists" if numbers > 1 else ""
        message = (
            f"The body has more than {most} values{lists} (ingress.max_values); send it in several calls"
        )
        raise _refused(message)


def _is_within(text: bytes, most: int, numbers: int) -> bool:
    """Return whether a JSON text has no more values than allowed, without a check of its syntax.

    Args:
        text: The text.
        most: Most values; for numbers in lists, `numbers` times as many.
        numbers: 1: a number counts as any other value.
    """
    if count_values(text) <= most:
        # The usual case: the text is within the bound even with the commas inside its strings.
        return True
    for escape in (b"\\\\", b'\\"'):
        text = text.replace(escape, b"")
    # A value has at most two strings, its name and itself, with two quotes each.
    if text.count(b'"') > 4 * most:
        return False
    text = b'"'.join(text.split(b'"')[::2])
    if numbers > 1:
        if text.count(b"[") + text.count(b"{") > most or text.count(b",") > numbers * most:
            return False
        text = _LIST_OF_NUMBERS.sub(b"[", text.translate(None, _NUMBERS))
    return count_values(text) <= most


def _check_most(field: str, value: int | None, most: int | None, setting: str) -> None:
    if value is not None and most is not None and value > most:
        raise _refused(f"{field}: {value} is more than the limit of {most} ({setting})", field)


def _check_size(name: str, size: int) -> None:
    if size > _MOST_VALUE:
        raise _refused(f"{name}: has {size} bytes; at most {_MOST_VALUE} are read", name)


def _refused(message: str, param: str | None = None) -> RequestError:
    return RequestError(400, "invalid_request_error", message, param=param)


# Forms

_FORM = re.compile(rb"[\r\n]*--")
"""The beginning of a form with files."""


def _inspect_form(body: bytes, content_type: str, model: str, path: str, limits: RequestLimits) -> Facts:
    """Return the facts of a form with a file, whose bytes give no bound on its tokens."""
    if not _FORM.match(body):
        # An Engine may parse the body as JSON, whatever its type. No JSON parser gets past the start of a
        # form.
        if b"\0" in body:
            # JSON in UTF-16 or UTF-32, whose values can't be counted.
            raise _refused("The body is neither a form nor JSON in UTF-8")
        _check_values(body, limits.max_values, numbers=1)
    # vLLM's application uses this parser, too. Headers have only characters of Latin-1.
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    values: dict[str, bytes] = {}
    if kind == b"multipart/form-data" and (boundary := options.get(b"boundary")):
        if len(boundary) > _MOST_BOUNDARY:
            message = f"content-type: has a boundary longer than {_MOST_BOUNDARY} bytes"
            raise _refused(message, "content-type")
        if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
            # vLLM's application decodes names and values with the charset, so another charset could hide
            # fields.
            raise _refused("content-type: the charset of a form must be utf-8", "content-type")
        form = _Form(boundary)
        try:
            form.write(body)
        except FormParserError as error:
            raise _refused(f"The form can't be read: {error}") from None
        # An empty field counts as missing.
        values = {name: value for name, value in form.found.items() if value}
    texts = {name: value.decode(errors="replace") for name, value in values.items()}
    facts = _facts_of_fields({"model": model or None} | texts, path, limits)
    return replace(
        facts,
        size=len(body),
        prompt=None if facts.runs else 0,
        stream=_is_true(values.get("stream")),
    )


class _Form(MultipartParser):
    """The fields of `_FORM_FIELDS` in a form with files, read as Starlette reads them for vLLM's application.

    Of several fields with one name the last counts, as in vLLM's application: otherwise a client could use a
    model that its API key doesn't allow. Files are skipped.
    """

    def __init__(self, boundary: bytes) -> None:
        super().__init__(boundary)
        # The parser warns of each invalid form; the client gets an error with the same text.
        self.logger = logging.Logger("forms", logging.ERROR)
        self.found: dict[str, bytes] = {}
        self._parts = 0
        self._name = self._file = ""
        self._header = self._value = self._disposition = self._content = b""

    def callback(self, name: str, data: Any = b"", start: Any = 0, end: Any = 0) -> None:
        """Handle a piece of the form; the parser calls this method."""
        match name:
            case "part_begin":
                self._parts += 1
                if self._parts > _MOST_PARTS:
                    raise _refused(f"The form has more than {_MOST_PARTS} parts")
                self._name = self._file = ""
                self._disposition = self._content = b""
            case "header_field":
                self._header += data[start:end]
            case "header_value":
                self._value += data[start:end]
            case "header_end":
                if self._header.lower() == b"content-disposition":
                    self._disposition = self._value
                self._header = self._value = b""
            case "headers_finished":
                if self._disposition.count(b";") > _MOST_PARAMETERS:
                    raise _refused(f"The form has a part with more than {_MOST_PARAMETERS} parameters")
                # Search for the names first: parsing takes a hundred times as long.
                if any(field.encode() in self._disposition for field in _FORM_FIELDS):
                    options = parse_options_header(self._disposition)[1]
                    field = options.get(b"name", b"").decode(errors="replace")
                    if b"filename" in options:
                        self._file = field
                    elif field in _FORM_FIELDS:
                        self._name = field
            case "part_data" if self._name:
                # The value isn't cut: a number may have its digits at the end.
                _check_size(self._name, len(self._content) + end - start)
                self._content += data[start:end]
            case "part_end" if self._file:
                # A whole file also replaces an earlier field with the same name.
                self.found.pop(self._file, None)
            case "part_end" if self._name:
                self.found[self._name] = self._content


# Prefixes

CHUNK_BYTES = 512
"""Bytes that one hash covers: about 128 tokens of text."""

LEVELS = 96
"""Most hashes of a prompt; the last one ends at half a megabyte."""


ENDS = tuple(accumulate(CHUNK_BYTES << level // 16 for level in range(LEVELS)))
"""Bytes after which each hash is taken: every 512 bytes up to 8 KiB, then at distances that double every 16
hashes. A prompt of 220 kB has 80 hashes, each at most a 16th of its length after the hash before."""

MAX_BYTES = ENDS[-1]


def prefix_of(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the prefix of a parsed body, the same as `inspect` finds in the text that pydantic writes."""
    return _prefix({name: to_json(body[name]) for name in PREFIX if name in body})


def _prefix(content: Mapping[str, bytes | msgspec.Raw]) -> tuple[int, ...]:
    text = b"".join([memoryview(content[name])[:MAX_BYTES] for name in PREFIX if name in content])
    return prefix_hashes(text[:MAX_BYTES])


def prefix_hashes(text: bytes) -> tuple[int, ...]:
    """Return a hash for each beginning of a text that ends at one of `ENDS`.

    Two texts with the same beginning have the same first hashes, in every process. Each hash covers the hash
    before it and the `CHUNK_BYTES` before its end, so a long text is sampled, and costs no more than 48 KiB.
    A text made to collide with another text only goes to that text's replica.
    """
    length = len(text)
    found = []
    last = 0
    for end in ENDS:
        if end > length:
            break
        last = crc32(text[end - CHUNK_BYTES : end], last)
        found.append(last)
    return tuple(found)


LEAST_MATCH = tuple(sum(4 * end < length for end in ENDS) for length in (0, *ENDS))
"""Number of hashes that cover less than a quarter of a prompt, by the number of its hashes.

A match of no more hashes saves too little to choose a replica by: a template that all prompts share would
send each new prompt to the replica of the first prompt.
"""
