"""Facts of a request: one inspection of its body gives its limits, routing key and a bound on its tokens."""

import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import fields
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol, TypeVar
from zlib import crc32

import msgspec
from msgspec import Struct, structs
from pydantic_core import from_json, to_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from serve_app.api.errors import ANTHROPIC, RequestError
from serve_app.api.protocol import MAX_NAME, MOST_TEXT, check_count
from serve_app.api.routes import (
    CHAT_BATCH,
    CLASSIFY,
    EMBEDDINGS,
    GENERATE,
    POOLING,
    PROCESS,
    RESPONSES,
    SCORE,
    SPEECH,
    TOKENIZING,
)
from serve_app.api.scheduling import (
    MAX_QUEUE_TIMEOUT_S,
    TIER_PRIORITY,
    SchedulingFields,
    ServiceTier,
    printable,
)

T = TypeVar("T")

TEMPLATE_TOKENS = 512
"""Maximum tokens that a chat template adds to a prompt: its own system prompt, hints on tools."""

UNKNOWN_CONTEXT = 131_072
"""Context that is assumed for a model whose context is not known yet, in tokens."""

BYTES_PER_TOKEN = 4
"""Bytes of text per token, about: English with a large vocabulary."""

EXPECTED_OUTPUT = 256
"""Maximum tokens of an answer in an estimate: the limit of a request is mostly far above its answer."""


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
    known = {field.name for field in (structs.fields if issubclass(kind, Struct) else fields)(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


class Facts(Struct, frozen=True, kw_only=True):
    """Facts that the body of a request states, before any token is counted.

    They travel as `PickledByName` does. A struct is made eight times as fast as a frozen dataclass.

    Attributes:
        size: Bytes of the body; 0 for a call without one.
        prompt: Bound on the tokens of all prompts together: a byte-level tokenizer makes no more tokens than
            there are bytes. None: the bytes give no bound, as with an image behind a URL.
        prompts: Prompts that the engine runs, each separately.
        answers: Answers to each prompt, which start together.
        output: Maximum tokens of each answer, as the request or the limit of the service states it; None: the
            rest of the context; 0: the route makes no tokens.
        values: Answers, and logprobs of their tokens, that vLLM makes for the whole answer at least.
        runs: Whether the route runs the model at all; `/tokenize` does not.
        grammar: Hash of the fields that may hold a grammar; empty: the body has none.
        media: Key or type of a part of a message that holds media; empty: there is none.
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
    grammar: bytes = b""
    media: str = ""
    stream: bool = False
    model: str | None = None
    service_tier: ServiceTier | None = None
    tenant: str | None = None
    queue_timeout_s: float | None = None
    prefix: tuple[int, ...] = ()
    tokens: int = EXPECTED_OUTPUT

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the fields by name."""
        return _unpickle, (type(self), structs.asdict(self))

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
        return structs.replace(self, prefix=tuple(number ^ salt for number in self.prefix))


NOTHING = Facts(prompt=0, output=0, runs=False)
"""Facts of a request that runs no model."""

UNKNOWN = Facts(prompt=None)
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
    **dict.fromkeys(("/v1/completions", "/v1/messages", GENERATE), ("max_tokens",)),
    RESPONSES: ("max_output_tokens",),
    **dict.fromkeys(SPEECH, ("max_completion_tokens",)),
}
"""Fields of a route with the most tokens of an answer; the first field that is stated counts."""

WITHOUT_MODEL = {*TOKENIZING, "/v1/messages/count_tokens", PROCESS}
"""Routes that run no model in vLLM."""

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

OF_ONE_KIND = {"prompt", "input", "tokens"}
"""Fields whose lists have items of one kind.

vLLM's validation reads all items of a list, once for each kind that an item could have: it takes 13 s on the
event loop for a prompt of a million numbers that aren't token ids.
"""

_SHALLOW = {"tools", "records", "prompts"}
"""Fields with lists whose items have no parts."""

_LOOKED = {*MESSAGE_LISTS, *OF_ONE_KIND, *_SHALLOW}
"""Fields with prompts, messages or parts."""

NUMBER_LISTS = {
    "/v1/completions": {"prompt"},
    **{path: {"tokens"} for path in ("/detokenize", "/v1/detokenize")},
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
    *("image_pil", "video", "video_url", "video_embeds"),
)
"""Keys and types of the parts of messages that hold media."""

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

# Bounds

NUMBERS = 10
"""Numbers in lists that count as one other value in fields for prompts in tokens: a million numbers hold an
Engine's event loop for a tenth of a second."""

OPTIONS = 10
"""All fields beside `CONTENT` together may have `max_values` divided by this number: unused fields are
parsed, too."""

OPTION_BYTES = 1 << 18
"""Maximum bytes of all fields beside `CONTENT` together."""

MAX_GRAMMAR_BYTES = 1 << 20
"""Maximum bytes of all fields with grammars, which vLLM parses as JSON on the event loop: 10 ms."""

MAX_TEMPLATE_BYTES = 16_384
"""Maximum bytes of `chat_template_kwargs`: a template may repeat a value for each message."""

MAX_TEMPLATE_NUMBER = 1_000_000
"""Largest number in `chat_template_kwargs`: a template may repeat a text as often."""

MOST_ANSWERS = 16_384
"""Maximum answers of vLLM to a prompt (`VLLM_MAX_N_SEQUENCES`): it adds the number of an answer to the
seed, and an engine ends at a seed beyond 64 bits."""

_MOST_VALUE = 4_096
"""Maximum bytes of a value that is read: a name, a number, a tier."""

_DEEPEST = 8
"""Maximum levels of lists and objects from a field to a part of a message."""

_MOST_FIELDS = 1_000
"""Maximum fields of a body."""

_MOST_PARAMETERS = 32
"""Maximum parameters in the header of a part: its name and its file's name, maybe with semicolons. Thousands
of parameters in each of thousands of parts take the parser seconds."""

_MOST_BOUNDARY = 70
"""Maximum bytes of the boundary of a form, by RFC 2046."""

_FALSE = (b"null", b"false", b"0", b"0.0", b"f", b"n", b"no", b"off")


def read(
    body: bytes, path: str, limits: RequestLimits, *, content_type: str = "application/json", model: str = ""
) -> tuple[Facts, bytes]:
    """Return the facts of a request, and its body with values that each route takes.

    The facts are never below what vLLM's application makes of the same body. A field that is null counts as
    not set, so the body has it no more: vLLM refuses null in some fields, and in others reads a value that is
    not the default. vLLM doesn't know the tier "fast", the newer name of "priority".

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
    kind = content_type.partition(";")[0].strip().lower()
    if path in SPEECH and "json" not in kind:
        fields = _form(body, content_type) if kind else {}
        if model:
            fields.setdefault("model", msgspec.json.encode(model))
        return structs.replace(_facts(fields, 0, path, limits), size=len(body), prompt=None), body
    # A function reads a body of any type as JSON, for embeddings as for its other calls.
    if kind and "json" not in kind and path not in CALLS and path != EMBEDDINGS:
        raise _refused(f"content-type: must be application/json, not {kind[:MAX_NAME]}", "content-type")
    content, taken = _fields(body)
    facts = _facts(content, len(body), path, limits)
    if facts.service_tier == "fast":
        # Of two fields with one name, the last counts.
        taken = taken.rstrip(b" \t\r\n").removesuffix(b"}") + b',"service_tier":"priority"}'
    return facts, taken


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
        return structs.replace(UNKNOWN, output=output)
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
        output: Maximum tokens of each answer; None: not stated.
    """
    expected = EXPECTED_OUTPUT if output is None else max(0, min(output, EXPECTED_OUTPUT))
    return size // BYTES_PER_TOKEN + answers * expected


# JSON

Value = msgspec.Raw | bytes
"""The JSON text of a value."""

Fields = Mapping[str, Value]


class _Message(msgspec.Struct):
    """The fields of a message that are read."""

    content: msgspec.Raw = msgspec.Raw(b"")


class _WithRole(_Message, kw_only=True):
    """A message of vLLM's routes has a role; in `/generate` a chat without one fails alone."""

    role: str


_Part: Any = msgspec.defstruct(
    "_Part",
    [
        (name, msgspec.Raw, msgspec.Raw(b""))
        for name in ("type", "uuid", "content", "output", "prompt_embeds", *MEDIA)
    ],
)

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_PART = msgspec.json.Decoder(_Part)
_TEXT = msgspec.json.Decoder(str)
_INTEGER = msgspec.json.Decoder(int, strict=False)
_CHAT: Mapping[bool, Any] = {
    True: msgspec.json.Decoder(list[_Message]),
    False: msgspec.json.Decoder(list[_WithRole]),
}
_CHATS: Mapping[bool, Any] = {
    True: msgspec.json.Decoder(list[list[_Message]]),
    False: msgspec.json.Decoder(list[list[_WithRole]]),
}
"""Messages, and lists of chats, of our own calls and of vLLM's routes."""
_TOKENS = msgspec.json.Decoder(list[int])
_KINDS: dict[bytes, tuple[msgspec.json.Decoder[Any], ...]] = {
    b"[": (msgspec.json.Decoder(list[list[int]]), msgspec.json.Decoder(list[list[str]])),
    b'"': (msgspec.json.Decoder(list[str]),),
    b"{": (msgspec.json.Decoder(list[dict[str, msgspec.Raw]]),),
}
"""Kinds of a list, by the first character of its first item; for other characters, token ids."""

_LIST_START = re.compile(rb"\s*\[\s*(.)", re.DOTALL)
_NUMBER_START = frozenset(b"-0123456789")
_QUOTE, _BRACE, _BRACKET = b'"{['
_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)
"""Errors of msgspec: wrong values, lists with thousands of levels, numbers with thousands of digits."""


def _number(text: Value) -> int:
    """Return a number or a flag; 0: vLLM reads another value, or refuses it."""
    value: Any = msgspec.json.decode(text)
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else 0


def _is_true(text: Value) -> bool:
    """Return whether vLLM may read the text of a field as true."""
    return bytes(text).strip(b'" ').lower() not in _FALSE


class _Repetition(msgspec.Struct):
    """The field `repetition_detection`."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


_REPETITION = msgspec.json.Decoder(_Repetition, strict=False)
_FLOAT = msgspec.json.Decoder(float, strict=False)


def _token_ids(text: Value) -> int:
    return bytes(text).count(b",") + 1


def _compared(text: Value) -> int:
    """Return how many tokens vLLM compares at each token, at most: it tries each size of a pattern."""
    each = _REPETITION.decode(text)
    smallest, largest = max(1, each.min_pattern_size), each.max_pattern_size
    sizes = (smallest + largest) * max(0, largest - smallest + 1) // 2
    return sizes * max(0, each.min_count - 1)


class _Bound(NamedTuple):
    """The bound of a field.

    Attributes:
        measure: Returns the size of a value.
        most: The largest size.
        words: Words of a message about the size, which stands for `{}`.
    """

    measure: Callable[[Value], float]
    most: float
    words: str


BOUNDS: dict[str, _Bound] = {
    **dict.fromkeys(
        ("stop", "stop_sequences", "bad_words", "vllm_xargs"), _Bound(len, MOST_TEXT, "has {} bytes")
    ),
    # The sampler of an engine on a GPU has room for 128, some of which are the model's own.
    "stop_token_ids": _Bound(_token_ids, 64, "has {} token ids"),
    **dict.fromkeys(("logit_bias", "allowed_token_ids"), _Bound(_token_ids, 1_024, "has {} token ids")),
    # A fifth of a millisecond.
    "repetition_detection": _Bound(_compared, 4_096, "compares {} tokens at each token"),
    # The exponent of a length.
    "length_penalty": _Bound(lambda text: abs(_FLOAT.decode(text)), 10, "is {} up or down"),
    "seed": _Bound(_INTEGER.decode, 2**63 - MOST_ANSWERS, "is {}"),
}
"""Bounds on fields of vLLM's routes.

vLLM goes through such a field at each token, where all other requests wait, or the engine ends at a larger
value. `GenerateRequest` has the bounds of `/generate`.
"""

_FORM_FIELDS = ("model", "n", "stream", *LENGTHS[SPEECH[0]], *BOUNDS)
"""Fields that are read in a form."""

_FIELDS: dict[str, Callable[[Value], Any]] = {
    **{name: bound.measure for name, bound in BOUNDS.items()},
    **dict.fromkeys(("model", "service_tier"), _TEXT.decode),
    **dict.fromkeys(("n", "best_of", *chain(*LENGTHS.values())), _INTEGER.decode),
    **dict.fromkeys(("logprobs", "top_logprobs"), _number),
    "stream": _is_true,
    "background": lambda text: bytes(text) != b"false",
}
"""Fields of vLLM's routes whose values are read, and how."""

_CALL_FIELDS: dict[str, Callable[[Value], Any]] = {
    **dict.fromkeys(("model", "service_tier", "tenant"), _TEXT.decode),
    "queue_timeout_s": msgspec.json.Decoder(float).decode,
    "max_tokens": msgspec.json.Decoder(int).decode,
}
"""Fields of `/generate` and `/process` whose values are read, and how."""


def _fields(body: bytes) -> tuple[dict[str, msgspec.Raw], bytes]:
    """Return the fields of a JSON object that are not null, each as text, and the object of these."""
    content = parsed = None
    try:
        # msgspec doesn't look at the encoding of texts that it doesn't read.
        if body.isascii() or body.decode():
            content = _OBJECT.decode(body)
    except _ERRORS:
        pass
    if content is None:
        # The text is invalid, or has values outside strict JSON, such as NaN.
        try:
            parsed = from_json(body)
        except ValueError as error:
            raise _refused(f"The body is not valid JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise _refused("The body must be a JSON object")
    count = len(content or parsed or ())
    if count > _MOST_FIELDS:
        raise _refused(f"The body has {count} fields; at most {_MOST_FIELDS} are taken")
    if content is None:
        content = _OBJECT.decode(to_json(parsed, inf_nan_mode="strings"))
    nulls = [name for name, text in content.items() if len(text) == 4 and bytes(text) == b"null"]
    for name in nulls:
        del content[name]
    if nulls and parsed is not None:
        body = to_json({name: parsed[name] for name in content}, inf_nan_mode="constants")
    elif nulls:
        body = msgspec.json.encode(content)
    return content, body


def _facts(content: Fields, size: int, path: str, limits: RequestLimits) -> Facts:
    """Return the facts of the fields of a body, or of a form."""
    call = path in CALLS
    stated, looked, options = _stated(content, _CALL_FIELDS if call else _FIELDS)
    if options > limits.max_values // OPTIONS:
        _check_options(content, limits.max_values // OPTIONS)
    if not call and stated.get("background"):
        message = "background: not served; the answer would outlive its client. Use a batch run instead"
        raise _refused(message, "background")
    runs, answers, output = path not in WITHOUT_MODEL, 1, 0 if path in POOLING else limits.max_tokens
    for name in reversed(LENGTHS.get(path, ())):
        # vLLM ignores a length that the route doesn't read.
        if (length := stated.get(name)) is not None:
            _check_most(name, length, limits.max_tokens, "ingress.max_tokens")
            # vLLM makes a token for a completion that only echoes its prompt, too.
            output = max(1, length)
    for name in ("n", "best_of"):
        if (count := stated.get(name)) is not None:
            _check_most(name, count, limits.max_n, "ingress.max_n")
            answers = max(answers, count)
    if not runs or output == 0:
        answers, output = 1, 0
    look = _Look(content, looked, size, path, limits)
    prompts = look.prompts()
    if "chat_template_kwargs" in content:
        _check_template(bytes(content["chat_template_kwargs"]))
    # Pairs put the same text into several prompts.
    prompt: int | None = (size * prompts if path in SCORE else size) + prompts * TEMPLATE_TOKENS
    if look.unknown or any(name in content and bytes(content[name]) != b'"do_not_pad"' for name in BEYOND):
        prompt = None
    return Facts(
        size=size,
        prompt=prompt if runs else 0,
        prompts=prompts,
        answers=answers,
        output=output,
        values=0 if output == 0 or call else _answer_values(stated, path, prompts),
        runs=runs,
        grammar=_grammar_hash(content) if runs and not (call or content.keys().isdisjoint(GRAMMARS)) else b"",
        media=look.media,
        stream=stated.get("stream", False),
        model=stated.get("model"),
        service_tier=_tier(stated, path),
        tenant=_tenant(stated),
        queue_timeout_s=_timeout_s(stated),
        prefix=_prefix(content) if runs and size > CHUNK_BYTES else (),
        tokens=_estimate(size, prompts * answers, output),
    )


def _stated(
    content: Fields, known: Mapping[str, Callable[[Value], Any]]
) -> tuple[dict[str, Any], list[str], int]:
    """Return the values of known fields, the fields with prompts, and the bytes of the fields beside them."""
    stated, looked, size = {}, [], 0
    for name, text in content.items():
        if name in CONTENT:
            if name in _LOOKED:
                looked.append(name)
            continue
        size += len(name) + len(text)
        if (read := known.get(name)) is not None:
            bound = BOUNDS.get(name)
            if bound is None and len(text) > _MOST_VALUE:
                raise _refused(f"{name}: has {len(text)} bytes; at most {_MOST_VALUE} are read", name)
            try:
                stated[name] = read(text)
            except msgspec.ValidationError as error:
                raise _refused(f"{name}: {str(error).lower().replace('`', '')}", name) from None
            except _ERRORS:
                raise _refused(f"{name}: the value can't be read", name) from None
            # NaN is in no bound.
            if bound is not None and not stated[name] <= bound.most:
                found = bound.words.format(stated[name])
                raise _refused(f"{name}: {found}; at most {bound.most} are allowed", name)
    return stated, looked, size


def _tier(stated: dict[str, Any], path: str) -> ServiceTier | None:
    tier: str | None = stated.get("service_tier")
    if tier == "standard_only" and path.startswith(ANTHROPIC):
        return "default"
    if tier is None or tier in TIER_PRIORITY:
        return tier
    raise _refused(f"service_tier: must be one of {', '.join(TIER_PRIORITY)}", "service_tier")


def _tenant(stated: dict[str, Any]) -> str | None:
    tenant: str | None = stated.get("tenant")
    try:
        return tenant if tenant is None else printable(tenant)
    except ValueError as error:
        raise _refused(f"tenant: {error}", "tenant") from None


def _timeout_s(stated: dict[str, Any]) -> float | None:
    seconds: float | None = stated.get("queue_timeout_s")
    if seconds is None or 0 < seconds <= MAX_QUEUE_TIMEOUT_S:
        return seconds
    message = f"queue_timeout_s: must be above 0 and at most {MAX_QUEUE_TIMEOUT_S:.0f}"
    raise _refused(message, "queue_timeout_s")


class _Look:
    """One look at the prompts and messages of a body, once their number is known to be bounded.

    Args:
        content: The fields of the body.
        looked: Names of the fields with prompts, messages or parts.
        size: Bytes of the body.
        path: The route.
        limits: The limits of a request.

    Attributes:
        media: Key or type of a part that holds media; empty: there is none.
        unknown: Whether a prompt may have more tokens than the bytes of its fields.

    Raises:
        RequestError: 400, the body has too many values, or its messages are of several kinds.
    """

    def __init__(
        self, content: Fields, looked: list[str], size: int, path: str, limits: RequestLimits
    ) -> None:
        self._content = content
        self._looked = looked
        self._path = path
        self._limits = limits
        self.media = ""
        self.unknown = False
        most = limits.max_values
        messages = content.get("messages", b"")
        self._start = start = _LIST_START.match(messages)
        nested = start is not None and start[1] == b"["
        # Each value takes a byte at least.
        large = size > most
        if large and bytes(messages).count(b"[" if nested else b"{") > limits.max_messages:
            self._check_values(most)
            large = False
        self._lists = CALLS.get(path) or (*PROMPT_LISTS, *(("messages",) if path in CHAT_LISTS else ()))
        for name in looked:
            # Prompts are counted before they are read.
            if name in self._lists and (count := _length(content[name])):
                check_count(name, count, limits.max_prompts)
        self._chats = _chats(start, messages, of_call=path in CALLS)
        if large:
            texts = chain(content.values(), (each.content for chat in self._chats for each in chat))
            if size - sum(len(text) for text in texts if _first(text) == _QUOTE) > most:
                self._check_values(most)

    def prompts(self) -> int:
        """Return the prompts of a route, each of which runs separately.

        Raises:
            RequestError: 400, there are too many prompts, messages or parts, or items of several kinds.
        """
        path = self._path
        prompts = 0
        for name in self._looked:
            text, count = self._content[name], None
            if name == "messages":
                count = self._messages()
            elif name in _SHALLOW:
                count = _length(text)
                if name == "tools":
                    _check_most(name, count, self._limits.max_messages, "ingress.max_messages")
            elif _first(text) in (_BRACE, _BRACKET):
                count, parts = self._items(name, text, _DEEPEST)
                if name in MESSAGE_LISTS:
                    _check_most(name, parts, self._limits.max_messages, "ingress.max_messages")
            # vLLM itself refuses an empty list.
            if count is not None and name in self._lists and (count or path in CALLS):
                check_count(name, count, self._limits.max_prompts)
                # The lists of two fields may be combined.
                prompts += count if count > 1 else 0
        # The items of the `input` of a response are messages of one conversation.
        return 1 if path == RESPONSES else prompts or 1

    def _check_values(self, most: int) -> None:
        """Check the values of all fields."""
        values, numbered = 0, NUMBER_LISTS.get(self._path, set())
        for name, text in self._content.items():
            values += 1 + _values(text, most, NUMBERS if name in numbered else 1)
            if values > most:
                message = (
                    f"The body has more than {most} values, or more than {NUMBERS * most} numbers in lists "
                    "(ingress.max_values); send it in several calls"
                )
                raise _refused(message)

    def _messages(self) -> int | None:
        """Look at the parts of all messages; return the items of the list; None: it isn't a list."""
        parts = 0
        for chat in self._chats:
            parts += len(chat)
            for message in chat:
                if _first(message.content) in (_BRACE, _BRACKET):
                    count, objects = self._items("messages", message.content, _DEEPEST)
                    parts += max(count or 0, objects)
        _check_most("messages", parts, self._limits.max_messages, "ingress.max_messages")
        if self._start is None:
            if _first(text := self._content["messages"]) == _BRACE:
                self._items("messages", text, _DEEPEST)
            return None
        return len(self._chats) if self._start[1] == b"[" else sum(map(len, self._chats))

    def _items(self, name: str, text: Value, levels: int) -> tuple[int | None, int]:
        """Look at the parts in a list, or in an object.

        Returns:
            The items; None for no list, or for a list of numbers, which is one prompt in tokens. Its objects,
            with the parts of their contents.
        """
        if not levels:
            raise _refused(f"{name}: nested too deeply", name)
        try:
            if _first(text) == _BRACE:
                return None, 1 + self._part(name, text, levels)
            start = _LIST_START.match(text)
            if start is None or start[1] == b"]":
                return 0, 0
            if start[1][0] in _NUMBER_START:
                if name in OF_ONE_KIND:
                    _TOKENS.decode(text)
                return None, 0
            items = _LIST.decode(text)
            if name in OF_ONE_KIND:
                self._check_kind(name, start[1], text, items)
            inner = (item for item in items if _first(item) in (_BRACE, _BRACKET))
            return len(items), sum(self._items(name, item, levels - 1)[1] for item in inner)
        except msgspec.ValidationError as error:
            raise _kinds(name, error) from None
        except _ERRORS:
            raise _refused(f"{name}: nested too deeply, or no list of messages", name) from None

    def _part(self, name: str, text: Value, levels: int) -> int:
        """Look for media in a message or a part; return the parts of its content."""
        part = _PART.decode(text)
        kind = _TEXT.decode(part.type) if _first(part.type) == _QUOTE else ""
        found = kind if kind in MEDIA else ""
        if not kind or len(part.uuid):
            # vLLM goes by the keys then.
            found = found or next((key for key in MEDIA if len(getattr(part, key))), "")
        self.media = self.media or found
        if found or kind == "prompt_embeds" or len(part.prompt_embeds):
            self.unknown = True
        inner = (each for each in (part.content, part.output) if _first(each) in (_BRACE, _BRACKET))
        return sum(self._items(name, each, levels - 1)[0] or 0 for each in inner)

    def _check_kind(self, name: str, first: bytes, text: Value, items: list[msgspec.Raw]) -> None:
        """Check that a list has items of one kind: texts, objects, lists of token ids, lists of texts."""
        if first in b'"{' and all(_first(item) == first[0] for item in items):
            return
        reason: msgspec.ValidationError | None = None
        for decoder in _KINDS.get(first, (_TOKENS,)):
            try:
                decoder.decode(text)
                return
            except msgspec.ValidationError as error:
                reason = reason or error
        raise _kinds(name, reason)


def _check_options(content: Fields, most: int) -> None:
    """Check the values of the fields beside the prompt."""
    options = [name for name in content if name not in CONTENT]
    values = {name: 1 + _values(content[name], most) for name in options}
    size = sum(len(name.encode()) + len(content[name]) for name in options)
    if size > OPTION_BYTES or sum(values.values()) > most:
        name = max(options, key=lambda name: (values[name], len(name), len(content[name])))
        message = (
            f"{name[:MAX_NAME]}: the largest of the fields beside the prompt, which have more than {most} "
            f"values or {OPTION_BYTES} bytes together; {most} is a tenth of ingress.max_values"
        )
        raise _refused(message, name[:MAX_NAME])


def _chats(start: "re.Match[bytes] | None", text: Value, *, of_call: bool) -> list[list[_Message]]:
    """Return the chats in a list of chats, or the only chat; none, if the text isn't a list."""
    if start is None or start[1] == b"]":
        return []
    try:
        if start[1] != b"[":
            return [_CHAT[of_call].decode(text)]
        chats: list[list[_Message]] = _CHATS[of_call].decode(text)
        return chats
    except msgspec.ValidationError as error:
        raise _kinds("messages", error) from None
    except _ERRORS:
        raise _refused("messages: nested too deeply, or no list of messages", "messages") from None


def _kinds(name: str, reason: object) -> RequestError:
    return _refused(f"{name}: the items of this list are not all of one valid kind: {reason}", name)


def _first(text: Value) -> int:
    """Return the first byte of a value; 0: there is none."""
    return memoryview(text)[0] if len(text) else 0


def _length(text: Value) -> int | None:
    """Return the length of a list; None: the text isn't a list, or is a list of numbers."""
    start = _LIST_START.match(text)
    return len(_LIST.decode(text)) if start and start[1][0] not in _NUMBER_START else None


def _values(text: Value, most: int, numbers: int = 1) -> int:
    """Return a bound on the values inside of a value, whatever the characters of its texts are.

    Args:
        text: The value.
        most: The largest number that has to be exact.
        numbers: Numbers in lists that count as one value.
    """
    if _first(text) not in (_BRACE, _BRACKET):
        return 0
    raw = bytes(text)
    for escape in (b"\\\\", b'\\"'):
        raw = raw.replace(escape, b"")
    quotes = raw.count(b'"')
    # A value has at most two texts, its name and itself, with two quotes each.
    if quotes <= 4 * most:
        raw = b'"'.join(raw.split(b'"')[::2])
    lists = raw.count(b"[") + raw.count(b"{")
    return max(lists + raw.count(b",") // numbers, quotes // (2 if numbers > 1 else 4))


def _grammar_hash(content: Fields) -> bytes:
    """Return a hash of the fields that may hold grammars.

    Raises:
        RequestError: 400, they are too long.
    """
    found = {name: bytes(content[name]) for name in GRAMMARS if name in content}
    if (size := sum(map(len, found.values()))) > MAX_GRAMMAR_BYTES:
        name = max(found, key=lambda name: len(found[name]))
        message = (
            f"{name}: grammars and tools have {size} bytes together; at most {MAX_GRAMMAR_BYTES} are allowed"
        )
        raise _refused(message, name)
    texts = (b"%s %d %s" % (name.encode(), len(text), text) for name, text in found.items())
    return hashlib.sha256(b"".join(texts)).digest()


def _answer_values(stated: dict[str, Any], path: str, prompts: int) -> int:
    """Return the answers, and the logprobs of their tokens, that a route makes for the whole answer at least.

    The engine counts the logprobs of prompts, and of answers without a stated length.
    """
    answers: int = prompts * max(1, stated.get("n", 1))
    if "logprobs" not in stated or path == RESPONSES or stated.get("stream"):
        return answers
    length: int = next((stated[name] for name in LENGTHS.get(path, ()) if name in stated), 0)
    each: int = max(0, stated["logprobs"])
    if path in CHATS:
        each = max(0, stated.get("top_logprobs", 0)) if each else -1
    return answers * (1 + max(0, length) * (1 + each))


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
        raise _refused(f"{name}: the value can't be read", name) from None


def _largest(value: Any) -> float:
    """Return the largest number in a value, without its sign."""
    if isinstance(value, dict | list):
        return max(map(_largest, value.values() if isinstance(value, dict) else value), default=0)
    return abs(value) if isinstance(value, int | float) else 0


def _check_most(field: str, value: int | None, most: int | None, setting: str) -> None:
    if value is not None and most is not None and value > most:
        raise _refused(f"{field}: {value} is more than the limit of {most} ({setting})", field)


def _refused(message: str, param: str | None = None) -> RequestError:
    return RequestError(400, "invalid_request_error", message, param=param)


# Forms

# An invalid form is its client's mistake, and no warning of the service.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class _Form(MultiPartParser):
    """Starlette's parser, by which vLLM's application reads a form; the content of files is left out."""

    def on_headers_finished(self) -> None:
        """Begin a part, unless its header has too many parameters."""
        if (self._current_part.content_disposition or b"").count(b";") > _MOST_PARAMETERS:
            raise MultiPartException(f"a part has more than {_MOST_PARAMETERS} parameters")
        super().on_headers_finished()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Add a piece of a field."""
        if self._current_part.file is None:
            super().on_part_data(data, start, end)


def _form(body: bytes, content_type: str) -> dict[str, bytes]:
    """Return the fields of a form with files that are read, as JSON texts.

    Of several fields with one name the last counts, as in vLLM's application: otherwise a client could use a
    model that its API key doesn't allow.
    """
    # Headers have only characters of Latin-1.
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if kind != b"multipart/form-data" or not (boundary := options.get(b"boundary")):
        raise _refused("content-type: must be multipart/form-data, with a boundary", "content-type")
    if len(boundary) > _MOST_BOUNDARY:
        message = f"content-type: has a boundary longer than {_MOST_BOUNDARY} bytes"
        raise _refused(message, "content-type")
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        # Another charset could hide fields.
        raise _refused("content-type: the charset of a form must be utf-8", "content-type")

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield body

    headers = Headers(raw=[(b"content-type", content_type.encode("latin-1", "replace"))])
    parsing = _Form(headers, pieces()).parse()
    try:
        # Nothing in it waits: the body is here, and files have no content.
        parsing.send(None)
    except StopIteration as done:
        form = done.value
    except MultiPartException as error:
        raise _refused(f"The form can't be read: {error.message}") from None
    found = {name: form[name] for name in _FORM_FIELDS if name in form}
    # An empty field counts as missing. vLLM reads a number with spaces around it.
    return {
        name: to_json(value if name == "model" else value.strip())
        for name, value in found.items()
        if isinstance(value, str) and value
    }


# Prefixes

CHUNK_BYTES = 512
"""Bytes that one hash covers: about 128 tokens of text."""

LEVELS = 96
"""Maximum hashes of a prompt; the last hash ends at half a megabyte."""


ENDS = tuple(accumulate(CHUNK_BYTES << level // 16 for level in range(LEVELS)))
"""Bytes after which each hash is taken: every 512 bytes up to 8 KiB, then at distances that double every 16
hashes. A prompt of 220 kB has 80 hashes, each at most a 16th of its length after the hash before."""

MAX_BYTES = ENDS[-1]


def prefix_of(body: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the prefix of a parsed body, the same as `read` finds in the text that pydantic writes."""
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
send each new prompt to the replica of the first prompt. Without the rule, a simulated fleet behind 4
Ingresses, whose 64 prefixes begin with one template, makes 14% fewer tokens/s.
"""
