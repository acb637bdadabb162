"""One look at a body: it counts no less than a full parse does, and costs a fraction of it."""

import json
import pickle
import string
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.types import Message

from serve_app.api.errors import RequestError
from serve_app.api.facts import (
    CONTENT,
    ENDS,
    LEAST_MATCH,
    MEDIA,
    MESSAGE_LISTS,
    NOTHING,
    PROMPT_LISTS,
    Facts,
    PickledByName,
    facts_of_call,
    prefix_of,
    read,
)
from serve_app.api.protocol import GenerateRequest
from serve_app.api.routes import (
    EMBEDDINGS,
    GENERATE,
    OPENAI,
    POOLING,
    PROCESS,
    SCORE,
    TOKENIZING,
)
from serve_app.settings.ingress import IngressSettings
from tests.progress import run
from tests.serve_app.inspected import inspect

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/transcriptions"
TEMPLATE = 512
"""Tokens that a chat template may add to a prompt."""
LIMITS = IngressSettings()
SMALL = IngressSettings(max_prompts=4, max_n=3, max_messages=6, max_values=60, max_tokens=50)
ROOMY = IngressSettings(max_values=1_000)
CALLS = {GENERATE: ("prompts", "messages"), PROCESS: ("records",)}
LENGTHS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    f"{CHAT}/batch": ("max_completion_tokens", "max_tokens"),
    **dict.fromkeys(("/v1/completions", "/v1/messages", GENERATE), ("max_tokens",)),
    "/v1/responses": ("max_output_tokens",),
    SPEECH: ("max_completion_tokens",),
    "/v1/audio/translations": ("max_completion_tokens",),
}
GRAMMARS = ("response_format", "text", "output_config", "structured_outputs", "tools", "tool_choice")
PATHS = (*OPENAI, *TOKENIZING, GENERATE, PROCESS)
MIB = 1 << 20
LONG = "All work and no play makes Jack a dull boy. " * 40


def facts_of(path: str, limits: IngressSettings = LIMITS, /, **fields: Any) -> Facts:
    return inspect(json.dumps(fields, separators=(",", ":")).encode(), path, limits)


def looked(body: bytes, path: str, limits: IngressSettings = LIMITS, **options: str) -> Facts | None:
    """Return the facts of a body; None: it is refused, as every wrong body is."""
    try:
        return inspect(body, path, limits, **options)
    except RequestError as error:
        refusal = error
    assert (refusal.status, refusal.type) == (400, "invalid_request_error")
    assert refusal.param is None or refusal.message.startswith(refusal.param)
    return None


# Bodies as clients may spell them

NAMES = (
    *(*MESSAGE_LISTS, *GRAMMARS, "prompts", "records", "tokens", "model", "service_tier", "tenant"),
    *("queue_timeout_s", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("stream", "use_beam_search", "background", "metadata", "unknown"),
)
PARTS = ("content", "type", "text", "image_url", "input_audio", "a")
LITERALS = (
    *("1", "2", "5", "-1", "1e3", "3.0", "0.5", "-0", "NaN", "-Infinity", " 3", "1" + "0" * 30, "9" * 5000),
    *("null", "true", "false", "[]", "{}", '"3"', '"true"', '""', '"flex"', '"fast"', '"demo"', '"b,c"'),
    *('"[{"', '"\\"x\\\\"', '"é"', '"\\ud83d\\ude00"', '"\\ud800"', f'"{"x" * 600}"', f'"{"x" * 5000}"'),
)


@st.composite
def spelled(draw: st.DrawFn, names: tuple[str, ...]) -> str:
    """Return a key as it stands in a body; one of its letters may be escaped."""
    name = draw(st.sampled_from(names))
    at = draw(st.integers(0, 3 * len(name)))
    return f'"{name}"' if at >= len(name) else f'"{name[:at]}\\u{ord(name[at]):04x}{name[at + 1 :]}"'


def _list(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(items, max_size=7).map(lambda items: f"[ {', '.join(items)}]")


def _object(names: tuple[str, ...], values: st.SearchStrategy[str], most: int) -> st.SearchStrategy[str]:
    fields = st.tuples(spelled(names), values).map(": ".join)
    return st.lists(fields, max_size=most).map(lambda fields: f"{{{', '.join(fields)} }}")


VALUES = st.recursive(
    st.sampled_from(LITERALS),
    lambda inner: _list(inner) | _object(PARTS, inner, 3) | _list(st.sampled_from(["1", "-2", "3.5"])),
    max_leaves=15,
)
BODIES = _object(NAMES, VALUES, 6).map(str.encode)


def parsed(body: bytes) -> dict[str, Any] | None:
    """Return what vLLM's application makes of a body; None: it refuses it."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in (int, float) for item in value)


def total(value: Any, *, numbers: bool) -> int:
    """Return the values in a value, itself included; without `numbers`, a list of numbers is one value."""
    if isinstance(value, dict):
        return 1 + sum(total(item, numbers=numbers) for item in value.values())
    if isinstance(value, list) and (numbers or not is_numbers(value)):
        return 1 + sum(total(item, numbers=numbers) for item in value)
    return 1


def parts(value: Any) -> int:
    """Return the messages in a value, and the parts of their contents."""
    if isinstance(value, dict):
        content = value.get("content")
        return 1 + (len(content) if isinstance(content, list) and not is_numbers(content[:1]) else 0)
    return sum(map(parts, value)) if isinstance(value, list) and not is_numbers(value[:1]) else 0


def has_media(value: Any) -> bool:
    """Return whether a message, or a part of its content, has a key or a type of `MEDIA`."""
    if isinstance(value, dict):
        kind = value.get("type")
        untyped = not isinstance(kind, str) or value.get("uuid") is not None
        return (
            (untyped and any(name in value for name in MEDIA))
            or (isinstance(kind, str) and kind in MEDIA)
            or has_media(value.get("content"))
            or has_media(value.get("output"))
        )
    return isinstance(value, list) and not is_numbers(value[:1]) and any(map(has_media, value))


def read_as(kind: Any, value: Any) -> Any:
    """Return a value as vLLM's request reads it; None: it doesn't, or refuses it."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


def check_counts(content: dict[str, Any], path: str, limits: IngressSettings) -> None:
    """Check that a body that was let through is within the limits, by a count of all that a parser makes."""
    options = {name: value for name, value in content.items() if name not in CONTENT}
    # The body itself, and each option, is a value that isn't counted.
    assert total(content, numbers=False) <= limits.max_values + 1
    assert total(content, numbers=True) <= 10 * limits.max_values + 1
    assert total(options, numbers=True) <= limits.max_values // 10 + 1 + len(options)
    if path in CALLS:
        for name in CALLS[path]:
            if isinstance(value := content.get(name), list) and not is_numbers(value[:1]):
                assert 0 < len(value) <= limits.max_prompts
        assert path != GENERATE or parts(content.get("messages")) <= limits.max_messages
        return
    for name in MESSAGE_LISTS:
        value = content.get(name)
        assert parts(value) <= limits.max_messages
        if name in PROMPT_LISTS and isinstance(value, list) and not is_numbers(value[:1]):
            assert len(value) <= limits.max_prompts
    for name in ("n", "best_of"):
        assert (read_as(int, content.get(name)) or 0) <= limits.max_n
    for name in LENGTHS.get(path, ()):
        assert (read_as(int, content.get(name)) or 0) <= (limits.max_tokens or sys.maxsize)


def check_facts(facts: Facts, content: dict[str, Any], body: bytes, path: str) -> None:
    """Check that facts are no less than what a full parse of the body says."""
    assert facts.size == len(body)
    assert facts.model == content.get("model")
    tier = content.get("service_tier")
    assert facts.service_tier == ("default" if tier == "standard_only" else tier)
    if path in CALLS:
        assert (facts.tenant, facts.queue_timeout_s) == (
            content.get("tenant"),
            content.get("queue_timeout_s"),
        )
        (count, *_) = [
            len(value) for name in CALLS[path] if isinstance(value := content.get(name), list)
        ] or [1]
        assert facts.prompts >= count or is_numbers(
            next(content[name] for name in CALLS[path] if name in content)
        )
    if path in CALLS or not facts.runs:
        return
    lists = [content.get(name) for name in PROMPT_LISTS] if path != "/v1/responses" else []
    counts = [len(value) for value in lists if isinstance(value, list) and not is_numbers(value[:1])]
    assert facts.prompts >= max(counts, default=1)
    if facts.prompt is not None:
        assert facts.prompt >= len(body) + facts.prompts * TEMPLATE
        assert content.get("prompt_embeds") is None
        assert not any(has_media(content.get(name)) for name in MESSAGE_LISTS if name != "tools")
    if facts.output == 0:
        assert facts.values == 0
    else:
        assert facts.values <= facts.prompts * facts.answers * (1 + (facts.output or 0) * 2**53)
    assert bool(facts.grammar) == any(name in content for name in GRAMMARS)
    assert facts.stream >= bool(read_as(bool, content.get("stream")))
    if path not in POOLING:
        assert facts.answers >= max(read_as(int, content.get(name)) or 1 for name in ("n", "best_of"))
        stated = [
            read_as(int, content[name]) for name in LENGTHS.get(path, ()) if content.get(name) is not None
        ]
        assert facts.output is None or not stated or facts.output >= stated[0]


@pytest.mark.parametrize("limits", [SMALL, ROOMY], ids=["small", "roomy"])
@example(b'{"messages": {"image_url": 1}}', CHAT)
@given(BODIES, st.sampled_from(PATHS))
def test_no_body_is_counted_for_less_than_a_parser_makes_of_it(
    limits: IngressSettings, body: bytes, path: str
) -> None:
    facts = looked(body, path, limits)
    content = parsed(body)
    if facts is not None and content is not None:
        check_counts(content, path, limits)
        check_facts(facts, content, body, path)
        found, taken = read(body, path, limits)
        assert found == facts
        # NaN is equal to nothing.
        tier = {"service_tier": "priority"} if facts.service_tier == "fast" else {}
        values = {name: value for name, value in content.items() if value is not None}
        assert repr(parsed(taken)) == repr(values | tier)


@given(
    st.binary(max_size=40) | BODIES, st.sampled_from(PATHS), st.sampled_from([0xED, 0xFF, 0x5C, 0x00, 0x22])
)
def test_no_bytes_break_the_look(body: bytes, path: str, byte: int) -> None:
    for broken in (body, body[:-3], bytes([byte]) + body, body[:5] + bytes([byte]) + body[5:]):
        for content_type in ("application/json", "text/plain", ""):
            looked(broken, path, SMALL, content_type=content_type)


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=9) | st.integers() | st.none(), max_size=5))
def test_a_body_within_the_limits_is_let_through(content: dict[str, Any]) -> None:
    words = {
        name: value for name, value in content.items() if name in {*MESSAGE_LISTS, "unknown", "metadata"}
    }
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
        assert facts_of(path, **words).prompts == 1


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"5", b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": 1} x', b"\xef\xbb\xbf{}"),
        *(b"[" * 10_000, "{}".encode("utf-16"), "{}".encode("utf-32-be")),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"^The body ") as caught:
        inspect(body, GENERATE, LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        b"1" + b"0" * 4500,
        b"[" * 5000 + b"]" * 5000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'"%s"' % (b"a" * 5000),
    ],
)
@pytest.mark.parametrize("other", [b"1", b"NaN"])
def test_a_value_that_can_not_be_read_is_refused_and_not_quoted(value: bytes, other: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        inspect(b'{"x": %s, "model": %s}' % (other, value), CHAT, LIMITS)
    assert caught.value.status == 400
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("messages", "count"),
    [
        ([{"role": "user", "content": "a, b"}] * 3, 3),
        ([{"role": "user", "content": ["a"] * 5}, {"role": "tool", "content": [{"text": "a"}] * 2}], 9),
        ([[{"role": "user", "content": "a"}] * 2] * 3, 6),
        ("a" * 9, 0),
    ],
)
@pytest.mark.parametrize("other", ["1", "NaN"])
def test_messages_and_their_parts_are_counted_exactly(messages: object, count: int, other: str) -> None:
    body = f'{{"messages": {json.dumps(messages)}, "x": {other}}}'.encode()
    inspect(body, CHAT, IngressSettings(max_messages=max(1, count)))
    if count > 1:
        with pytest.raises(RequestError, match=f"^messages: {count} .*ingress.max_messages") as caught:
            inspect(body, CHAT, IngressSettings(max_messages=count - 1))
        assert caught.value.param == "messages"


@pytest.mark.parametrize("other", ["1", "NaN"])
def test_messages_that_are_nested_too_deeply_are_refused(other: str) -> None:
    text = "[" * 9 + '{"content": "a"}' * 2 + "]" * 9
    text = text.replace("}{", "}, {")
    for name in ("system", "documents"):
        with pytest.raises(RequestError, match=f"^{name}: nested too deeply"):
            inspect(f'{{"{name}": {text}, "x": {other}}}'.encode(), CHAT, LIMITS)


@pytest.mark.parametrize(
    "text", ["a, b, c, [d], {e}" * 50, '"' * 100, '\\"' * 99 + ",[{" * 99, "\\" * 51 + '",' * 99, '\n,"' * 99]
)
def test_what_is_in_a_text_is_no_value(text: str) -> None:
    assert facts_of("/v1/completions", IngressSettings(max_values=20), prompt=text, n=1).prompts == 1


def test_prompts_in_tokens_may_be_long() -> None:
    limits = IngressSettings(max_values=20)
    facts_of("/v1/completions", limits, prompt=list(range(40)))
    assert facts_of("/v1/completions", limits, prompt=[list(range(40)), list(range(40))]).prompts == 2
    with pytest.raises(RequestError, match=r"20 values.*200 numbers.*ingress\.max_values"):
        facts_of("/v1/completions", limits, prompt=list(range(202)))
    with pytest.raises(RequestError, match="20 values"):
        facts_of("/v1/completions", limits, documents=list(range(40)))


@pytest.mark.parametrize(
    ("name", "text", "at"),
    [
        ("prompt", "[1.5, 1.5]", "[0]"),
        ("prompt", '[1, 1, "a"]', "[2]"),
        ("prompt", "[[1, 1.5]]", "[0][1]"),
        ("prompt", '["a", 1]', "[1]"),
        ("prompt", "[null, null]", "[0]"),
        ("tokens", '[ "a", 1]', "[1]"),
        ("input", "[{}, 1]", "[1]"),
        ("messages", "[{}, {}]", "[0]"),
        ("messages", '[{"role":"user"}, 1]', "[1]"),
        ("messages", '[[{"role":"user"}, {}]]', "[0][1]"),
    ],
)
def test_a_list_is_refused_at_its_first_wrong_item(name: str, text: str, at: str) -> None:
    with pytest.raises(RequestError) as caught:
        inspect(f'{{"{name}": {text}}}'.encode(), CHAT, LIMITS)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert f"`${at}`" in caught.value.message


def test_a_chat_without_a_role_is_left_to_its_row_of_generate() -> None:
    body = b'{"messages": [[{"role": "user"}], [{"content": "x"}]], "partial": true}'
    assert inspect(body, GENERATE, LIMITS).prompts == 2


@given(
    st.sampled_from(["prompt", "input", "tokens"]),
    st.text()
    | st.lists(st.text())
    | st.lists(st.integers())
    | st.lists(st.lists(st.integers(), min_size=1))
    | st.lists(st.dictionaries(st.text(), st.text())),
)
def test_a_list_of_one_kind_passes(name: str, value: object) -> None:
    facts_of("/v1/responses", **{name: value})


def test_the_messages_of_a_conversation_are_one_prompt() -> None:
    facts = facts_of("/v1/responses", input=[{"content": "hi"}] * 20, max_output_tokens=7)
    assert (facts.prompts, facts.answers, facts.output) == (1, 1, 7)
    assert facts.prompt == facts.size + TEMPLATE


# Tokens


def test_a_prompt_has_no_more_tokens_than_its_body_has_bytes() -> None:
    facts = facts_of(CHAT, messages=[{"role": "user", "content": "hello"}], max_tokens=7)
    assert (facts.prompt, facts.prompts, facts.answers, facts.output) == (
        facts.size + TEMPLATE,
        1,
        1,
        7,
    )
    assert (facts.runs, facts.grammar, facts.stream) == (True, b"", False)


@pytest.mark.parametrize(
    "part", ["image_url", "input_audio", "video_url", "image_embeds", "audio_embeds", "video_embeds"]
)
def test_bytes_say_nothing_about_media(part: str) -> None:
    messages = [{"role": "user", "content": [{"type": part, part: {"url": "https://x/y"}}]}]
    assert facts_of(CHAT, messages=messages).prompt is None
    assert facts_of(CHAT, messages=[{"role": "user", "content": f"an {part}"}]).prompt is not None
    for typed in ({"type": part}, {part: "https://x/y"}):
        inner = [{"role": "user", "content": [{"type": "tool_result", "content": [typed]}]}]
        assert facts_of("/v1/messages", messages=inner).prompt is None
    assert facts_of("/v1/responses", input=[{"output": [{"type": part}]}]).prompt is None


MEDIA_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": {"url": "data:,"}}, "image_url"),
    ({"image_url": "data:,"}, "image_url"),
    ({"image_url": None, "uuid": "x"}, "image_url"),
    ({"type": "text", "text": "a", "uuid": "x", "image_url": "data:,"}, "image_url"),
    ({"type": "input_image", "image_url": "data:,", "detail": "auto"}, "input_image"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
    ({"type": "video_url", "video_url": {"url": "https://x.example/a.mp4"}}, "video_url"),
    ({"type": "image_embeds", "image_embeds": "AAAA"}, "image_embeds"),
    ({"type": "image", "source": {"type": "url", "url": "x"}}, "image"),
    ({"type": "text", "text": "a", "image_url": None}, ""),
    ({"type": "input_text", "text": "image"}, ""),
]


@pytest.mark.parametrize(("part", "kind"), MEDIA_PARTS)
def test_a_part_with_media_is_known_by_its_name_on_every_route(part: dict[str, Any], kind: str) -> None:
    message, document = {"role": "user", "content": [part]}, {"content": [part]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [message]}),
        (f"{CHAT}/batch", {"messages": [[message]]}),
        (GENERATE, {"messages": [[message]]}),
        ("/v1/messages", {"messages": [message], "system": [part]}),
        ("/v1/responses", {"input": [message]}),
        ("/tokenize", {"messages": [message]}),
        (EMBEDDINGS, {"messages": [message]}),
        ("/v1/rerank", {"query": "q", "documents": [document]}),
        ("/v1/score", {"queries": document, "documents": "a"}),
    ]
    assert [facts_of(path, **body).media for path, body in bodies] == [kind] * len(bodies)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"a": "x" * MIB}}, "response_format"),
        ({"text": "x" * (MIB // 2), "tools": ["x" * (MIB // 2)]}, "tools"),
    ],
)
def test_fields_for_grammars_are_bounded(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="at most 1048576 are allowed") as caught:
        facts_of(CHAT, **fields)
    assert caught.value.param == param


def test_grammars_have_a_hash_by_their_fields() -> None:
    def hash_of(**fields: Any) -> bytes:
        return facts_of(CHAT, **fields).grammar

    values: list[object] = [{}, [], {"a": 1}]
    keys = {hash_of(**{name: value}) for name in GRAMMARS for value in values}
    assert len(keys) == len(values) * len(GRAMMARS)
    assert hash_of(tools=[1], prompt="x" * MIB, n=2) == hash_of(n=1, tools=[1])
    # Also beside what strict JSON hasn't.
    assert inspect(b'{"tools": [1], "seed": 1, "top_p": NaN}', CHAT, LIMITS).grammar == hash_of(tools=[1])
    assert not hash_of(prompt="x")


@pytest.mark.parametrize("name", ["image", "video", "audio_url", "prompt_embeds", "previous_response_id"])
def test_a_name_of_media_outside_a_part_of_a_message_is_no_media(name: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {name: {}}}}}
    called = {"type": "tool_use", "name": "f", "id": "x", "input": {name: "x"}}
    messages = [{"role": "user", "content": name}, {"role": "assistant", "content": [called]}]
    facts = facts_of(CHAT, messages=messages, tools=[tool], response_format={name: {}}, metadata={name: name})
    assert facts.prompt == facts.size + TEMPLATE
    assert facts.most(131_072) < 131_072 or facts.output is None


@pytest.mark.parametrize("field", ["prompt_embeds", "previous_response_id", "padding"])
def test_bytes_say_nothing_about_a_prompt_that_a_field_makes_longer(field: str) -> None:
    assert facts_of("/v1/embeddings", input="a", **{field: "max_length"}).most(100) == 100
    assert facts_of("/v1/embeddings", input="a", **{field: None}).prompt is not None


@pytest.mark.parametrize(
    ("path", "fields", "values"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": 3, "logprobs": True}, 3),
        (CHAT, {"n": 3, "logprobs": True, "max_tokens": 10}, 3 * 11),
        (CHAT, {"n": 32, "logprobs": True, "top_logprobs": 20, "max_tokens": 300}, 32 * (1 + 300 * 21)),
        (CHAT, {"n": 3, "logprobs": False, "top_logprobs": 20, "max_tokens": 300}, 3),
        (CHAT, {"logprobs": True, "top_logprobs": -1, "max_tokens": 10}, 11),
        (CHAT, {"logprobs": True, "top_logprobs": "many", "max_tokens": 10}, 11),
        (CHAT, {"logprobs": True, "top_logprobs": 20, "max_tokens": 300, "stream": True}, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 4, "max_tokens": 10}, 4 * 51),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 0, "max_tokens": 10}, 2 * 11),
        ("/v1/embeddings", {"input": ["a", "b"], "n": 2}, 0),
    ],
)
def test_the_values_of_an_answer_that_a_body_states(path: str, fields: dict[str, Any], values: int) -> None:
    assert facts_of(path, **fields).values == values
    # The limit of the config is no length that the request states.
    limited = facts_of(path, IngressSettings(max_tokens=500), **fields)
    assert limited.values == values


# Variables of chat templates

OF_FUNCTIONS = """
self model_config tokenizer conversation conversations messages chat_template tools documents
add_generation_prompt continue_final_message tokenize padding truncation max_length return_tensors
return_dict return_assistant_tokens_mask tokenizer_kwargs processor_kwargs
"""
TEMPLATES = ("chat_template_kwargs: ", "chat_template_kwargs.")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        *(({name: 1}, f"{name}: is an argument") for name in OF_FUNCTIONS.split()),
        ({"documents": []}, "use the field documents"),
        ({"enable_thinking": True, "bos_token": "x" * 9}, "bos_token: is a token of the model"),
        ({"a": "x" * 16_384}, "at most 16384 are allowed"),
        ({"a": [{"b": 1_000_001}]}, "at most 1000000 is allowed"),
        ({"a": -1e300}, "at most 1000000 is allowed"),
    ],
)
def test_a_request_hands_nothing_but_variables_to_a_template(variables: dict[str, Any], reason: str) -> None:
    for path in (*OPENAI, "/tokenize"):
        with pytest.raises(RequestError) as caught:
            facts_of(path, chat_template_kwargs=variables)
        assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")
        assert caught.value.message.startswith(TEMPLATES)
        assert reason in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        rb'{"\u0070adding": "max_length"}',
        b'{"a": NaN, "padding": "max_length"}',
        b'{"padding": null}',
        b'{"a": %s1%s}' % (b"[" * 3000, b"]" * 3000),
        b'{"a": 1%s}' % (b"0" * 5000),
    ],
)
def test_no_spelling_hides_what_is_handed_to_a_template(text: bytes) -> None:
    for body in (b'{"chat_template_kwargs": %s}', rb'{"chat\u005ftemplate_kwargs": %s, "x": NaN}'):
        with pytest.raises(RequestError) as caught:
            inspect(body % text, CHAT, LIMITS)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        5,
        {"enable_thinking": False, "thinking_budget": -1, "reasoning_effort": "low"},
        {"xml_tools": [{"name": "f", "parameters": {"padding": 1}}], "date_string": "29 Nov 2026"},
    ],
)
def test_variables_of_a_template_pass(value: object) -> None:
    assert facts_of(CHAT, messages=[], chat_template_kwargs=value).prompts == 1


@pytest.mark.parametrize("name", ["image\\u005furl", "\\u0069mage_url", "image_ur\\u006C"])
def test_media_do_not_hide_behind_escapes(name: str) -> None:
    text = f'{{"messages": [{{"role": "user", "content": [{{"type": "{name}", "{name}": "https://x/y"}}]}}]}}'
    assert inspect(text.encode(), CHAT, LIMITS).prompt is None


def test_escapes_that_encoders_write_are_no_media() -> None:
    assert (
        facts_of(CHAT, messages=[{"role": "user", "content": "é世\x00\x1f\x7f\U0001f600"}]).prompt is not None
    )


def test_the_limit_that_the_route_reads_counts() -> None:
    facts = facts_of(CHAT, messages=[], max_tokens=9, max_completion_tokens=7, max_output_tokens=1, n=3)
    assert (facts.answers, facts.output) == (3, 7)
    assert facts_of(CHAT, messages=[], max_tokens=9, max_output_tokens=1).output == 9
    assert facts_of("/v1/responses", input="a", max_tokens=9, max_output_tokens=1).output == 1
    assert facts_of("/v1/completions", prompt="a", max_completion_tokens=1).output is None


def test_without_a_limit_the_context_counts_or_that_of_the_config() -> None:
    assert facts_of(CHAT, messages=[]).output is None
    for path in (CHAT, GENERATE):
        assert facts_of(path, IngressSettings(max_tokens=50), messages=[[{"role": "user"}]]).output == 50


def test_each_prompt_of_a_list_has_answers_of_its_own() -> None:
    facts = facts_of("/v1/completions", prompt=["a", "b", "c"], n=2, best_of=4, max_tokens=5)
    assert (facts.prompts, facts.answers, facts.output) == (3, 4, 5)
    assert facts.prompt == facts.size + 3 * TEMPLATE
    assert facts_of("/v1/completions", prompt=[1, 2, 3], max_tokens=5).prompts == 1


@pytest.mark.parametrize(
    ("path", "fields", "prompts"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}, 2),
        ("/v1/embeddings", {"messages": [[{"role": "user", "content": "hi"}]] * 3}, 3),
        ("/v1/classify", {"input": ["a", "b"]}, 2),
        *((path, {"query": "q", "documents": ["a", "b", "c"]}, 3) for path in SCORE),
    ],
)
def test_routes_without_answers_have_no_output(path: str, fields: dict[str, Any], prompts: int) -> None:
    facts = facts_of(path, n=3, **fields)
    assert (facts.prompts, facts.answers, facts.output) == (prompts, 1, 0)
    # A query counts once for each document.
    size = facts.size * (prompts if path in SCORE else 1)
    assert facts.prompt == size + prompts * TEMPLATE
    assert facts.most(100_000) == facts.prompt


@pytest.mark.parametrize("path", [*TOKENIZING, "/v1/messages/count_tokens", PROCESS])
def test_routes_that_run_no_model_take_no_tokens(path: str) -> None:
    facts = facts_of(path, messages=[], records=[1, "a"], prompt="x" * 999)
    assert not facts.runs
    assert facts.most(None) == 0


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_field_that_may_hold_a_grammar_is_seen(name: str) -> None:
    assert facts_of(CHAT, **{name: {}}).grammar
    assert inspect(f'{{"\\u{ord(name[0]):04x}{name[1:]}": {{}}}}'.encode(), CHAT, LIMITS).grammar


@pytest.mark.parametrize("name", ["prompts", "messages"])
def test_a_call_reserves_for_each_of_its_prompts(name: str) -> None:
    values = ["a", "b"] if name == "prompts" else [[{"role": "user", "content": "a"}]] * 2
    facts = facts_of(GENERATE, max_tokens=9, tenant="t", **{name: values})
    assert (facts.prompt, facts.prompts, facts.answers) == (facts.size + 2 * TEMPLATE, 2, 1)
    assert (facts.output, facts.tenant) == (9, "t")


@pytest.mark.parametrize(
    ("facts", "most"),
    [
        (Facts(prompt=100, output=50), 150),
        (Facts(prompt=100), 1000),
        (Facts(prompt=100, output=5000), 1000),
        (Facts(prompt=5000, output=50), 1000),
        (Facts(prompt=None, output=50), 1000),
        (Facts(prompt=100, answers=3, output=50), 250),
        (Facts(prompt=100, prompts=2, answers=3, output=50), 400),
        (Facts(prompt=100, prompts=2, output=0), 100),
        (Facts(prompt=None, prompts=2, output=0), 2000),
        (Facts(prompt=100, output=-5), 100),
        (Facts(prompt=100, output=50, runs=False), 0),
        (NOTHING, 0),
    ],
)
def test_a_prompt_and_its_answer_share_the_context(facts: Facts, most: int) -> None:
    assert facts.most(1000) == most


def test_a_model_that_has_told_no_context_may_have_a_long_one() -> None:
    assert Facts(prompt=100).most(None) == 131_072


def test_the_estimate_is_that_of_the_body_and_the_answers_of_all_prompts() -> None:
    facts = facts_of("/v1/completions", prompt=LONG, max_tokens=5, n=3)
    assert facts.tokens == facts.size // 4 + 3 * 5
    facts = facts_of(CHAT, messages=[], max_completion_tokens=10**9)
    assert facts.tokens == facts.size // 4 + 256
    for path, name in ((GENERATE, "prompts"), ("/v1/completions", "prompt")):
        facts = facts_of(path, max_tokens=100, **{name: ["a, b, c", "d"]})
        assert facts.tokens == facts.size // 4 + 2 * 100
    facts = facts_of("/v1/embeddings", input=["a", "b"])
    assert facts.tokens == facts.size // 4


# Calls over a handle


def test_a_call_over_the_handle_may_be_a_request_or_its_fields() -> None:
    fields: dict[str, Any] = {"prompts": ["é", "ab"], "max_tokens": 7}
    facts = facts_of_call(fields, 50)
    assert facts == facts_of_call(GenerateRequest(**fields), 50)
    assert (facts.size, facts.prompt, facts.prompts, facts.output) == (4, 4 + 2 * TEMPLATE, 2, 7)
    assert facts.tokens == 1 + 2 * 7
    chat = facts_of_call({"messages": [[{"role": "user", "content": "x" * 400}]]}, 50)
    assert (chat.prompts, chat.output) == (1, 50)
    assert chat.prompt is not None
    assert 400 + TEMPLATE < chat.prompt < 500 + TEMPLATE
    assert facts_of_call(GenerateRequest(prompts=["a"])).output is None


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.none() | st.integers(1, 99))
def test_a_call_over_the_handle_takes_no_less_than_the_same_call_over_http(
    prompts: list[str], limit: int | None
) -> None:
    facts = facts_of_call({"prompts": prompts, "max_tokens": limit})
    size = sum(len(text.encode(errors="replace")) for text in prompts)
    assert (facts.prompt, facts.prompts, facts.output) == (
        size + len(prompts) * TEMPLATE,
        len(prompts),
        limit,
    )


@pytest.mark.parametrize("body", [None, 3, "text", [], {}, {"prompts": "x"}, {"prompts": [], "messages": 3}])
def test_a_call_that_makes_no_sense_is_estimated_all_the_same(body: object) -> None:
    facts = facts_of_call(body)
    assert facts.tokens == 256
    assert facts.most(1000) == 1000


def test_a_limit_that_is_none_is_ignored() -> None:
    assert facts_of_call({"prompts": [5], "max_tokens": "many"}) == facts_of_call({"prompts": [5]})


@pytest.mark.parametrize(
    "body", ['{"service_tier": "fast", "x": 1}', ' {"x": NaN, "service_tier" : "fast" } \n']
)
def test_the_fast_tier_is_replaced_and_the_other_fields_stay(body: str) -> None:
    # NaN is equal to nothing.
    expected = repr(json.loads(body) | {"service_tier": "priority"})
    assert repr(json.loads(read(body.encode(), "/v1/completions", LIMITS)[1])) == expected


# Prefixes


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many hashes two prompts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def hashes_of(text: str) -> tuple[int, ...]:
    return facts_of("/v1/completions", prompt=text).prefix


def texts(most: int) -> st.SearchStrategy[str]:
    """Return texts of one byte for each character; long texts repeat a few."""
    return st.tuples(st.text(string.ascii_letters, min_size=1, max_size=9), st.integers(0, most)).map(
        lambda drawn: (drawn[0] * most)[: drawn[1]]
    )


@given(texts(3_000), texts(3_000), texts(3_000))
def test_prompts_have_the_hashes_of_their_common_beginning_in_common(shared: str, a: str, b: str) -> None:
    alike = common(hashes_of(shared + a), hashes_of(shared + b))
    # A quote stands before the text.
    assert alike >= sum(end <= len(shared) + 1 for end in ENDS)


def test_prompts_that_differ_have_no_hash_in_common_behind_the_difference() -> None:
    text = string.ascii_letters * 150
    for at in (0, 510, 511, 5_000):
        one, two = hashes_of(text), hashes_of(f"{text[:at]}!{text[at + 1 :]}")
        assert common(one, two) == (at + 1) // 512
        assert not set(one[(at + 1) // 512 :]) & set(two)


@pytest.mark.parametrize("size", [511, 512, 1_000, 8_192, 20_000, 220_000, ENDS[-1], 10 * ENDS[-1]])
def test_the_hashes_of_a_prompt_are_bounded_and_reach_its_end(size: int) -> None:
    hashes = hashes_of("x" * (size - 2))
    assert len(hashes) <= len(ENDS) == 96
    reached = ENDS[len(hashes) - 1] if hashes else 0
    assert reached >= min(ENDS[-1], size - max(512, size // 8))


def test_a_quarter_of_a_prompt_is_the_least_match() -> None:
    # 16 chunks of 512 bytes: the first three end before a quarter.
    assert LEAST_MATCH[16] == 3
    for hashes in range(1, len(ENDS) + 1):
        assert 4 * ENDS[LEAST_MATCH[hashes]] >= ENDS[hashes - 1]


def test_other_processes_compute_the_same_hashes() -> None:
    """Several Ingresses that know nothing of each other draw the same replicas for a prompt."""
    script = "from serve_app.api.facts import prefix_of; print(prefix_of({'prompt': 'abc' * 1000}))"
    done = run([sys.executable, "-c", script])
    assert done.stdout == f"{hashes_of('abc' * 1000)}\n", done.stderr


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", LONG),
        (CHAT, "messages", chat(LONG)),
        ("/v1/responses", "input", LONG),
        ("/v1/messages", "messages", chat(LONG)),
        (GENERATE, "prompts", [LONG]),
        (GENERATE, "messages", [chat(LONG)]),
    ],
)
def test_the_prompt_is_hashed_whatever_is_around_it(path: str, field: str, value: object) -> None:
    text = json.dumps(value, separators=(",", ":")).encode()
    first = facts_of(path, **{field: value, "max_tokens": 5})
    other = facts_of(path, **{"model": "demo", "max_tokens": 7, field: value})
    assert len(first.prefix) == 3
    assert first.prefix == other.prefix == prefix_of({field: value})
    nan = b'{"temperature": NaN, "%s": %s}' % (field.encode(), text)
    if path != GENERATE:
        assert inspect(nan, path, LIMITS).prefix == first.prefix


def test_what_comes_first_in_the_prompt_is_hashed_first() -> None:
    body = {"messages": chat("Hello"), "system": LONG}
    turned = {"system": LONG, "messages": chat("Hello")}
    other = {"messages": chat("Hello"), "system": f"Other. {LONG}"}
    path = "/v1/messages"
    assert common(facts_of(path, **body).prefix, facts_of(path, **turned).prefix) == 3
    assert common(facts_of(path, **body).prefix, facts_of(path, **other).prefix) == 0


def test_the_next_turn_of_a_chat_begins_as_the_one_before() -> None:
    turns = [LONG, "An answer.", "A question."]
    first, second = facts_of(CHAT, messages=chat(LONG)), facts_of(CHAT, messages=chat(*turns))
    assert common(first.prefix, second.prefix) == len(first.prefix) == 3


def test_an_adapter_shares_no_prefix_with_its_model_or_another() -> None:
    facts = facts_of("/v1/completions", prompt=LONG)
    one, two = facts.cached_for("one", ""), facts.cached_for("two", "")
    assert one == facts.cached_for("one", "")
    assert common(one.prefix, facts.prefix) == common(one.prefix, two.prefix) == 0
    assert len(one.prefix) == len(facts.prefix)


def test_a_tenant_and_a_salt_share_no_prefix_with_others() -> None:
    facts = facts_of("/v1/completions", prompt=LONG)
    salted = facts_of("/v1/completions", prompt=LONG, cache_salt="s")
    kinds = [
        facts,
        *(facts.cached_for(adapter, tenant) for adapter in ("", "a") for tenant in ("acme", "b", "a")),
        salted,
        salted.cached_for("", "acme"),
    ]
    for number, one in enumerate(kinds):
        assert not any(common(one.prefix, other.prefix) for other in kinds[:number])
    assert facts.cached_for("", "") == facts


@pytest.mark.parametrize("value", [None, 5, [1, 2], "x", [{}]])
def test_a_prompt_of_any_shape_has_a_key(value: object) -> None:
    for name in ("prompt", "input"):
        assert facts_of("/v1/completions", **{name: value}).prefix == ()


# Forms

CUT = "multipart/form-data; boundary=cut"
DISPOSITION = b"content-disposition: form-data; name="


def form(*fields: bytes) -> bytes:
    return b"".join(b"--cut\r\n" + field + b"\r\n" for field in fields) + b"--cut--\r\n"


def form_facts(body: bytes, type: str = CUT, limits: IngressSettings = LIMITS, model: str = "") -> Facts:
    return inspect(body, SPEECH, limits, content_type=type, model=model)


FILE = (
    b'Content-Disposition: form-data; name="file"; filename="model"\r\n\r\n' + b"\xff\r\nname=model\r\n\r\nx"
)
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-\xc3\xa9'
PLAIN = b"content-disposition: form-data; name=model\r\ncontent-type: text/plain\r\n\r\nwhisper-\xc3\xa9"
OTHER = b'Content-Disposition: form-data; name="model"\r\n\r\nother'
FAKE = b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\nx'


async def taken(body: bytes, type: str) -> dict[str, str] | None:
    """Return the fields of a form as vLLM's application takes them; None: it refuses the form."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", type.encode("latin-1", "replace"))]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    try:
        async with request.form() as fields:
            return {name: value for name in fields if isinstance(value := fields[name], str)}
    except Exception:
        # Starlette's own error, or one of the codec that the type names.
        return None


@pytest.mark.parametrize(
    ("parts", "model"),
    [
        *((parts, "whisper-é") for parts in ((FILE, MODEL), (MODEL, FILE), (PLAIN,), (FILE, PLAIN, MODEL))),
        ((FILE,), None),
        ((MODEL.replace(b'"model"', b'"models"'),), None),
        ((MODEL, OTHER), "other"),
        ((OTHER, FILE, MODEL), "whisper-é"),
        ((MODEL, OTHER.replace(b"name=", b"name = ")), "other"),
        ((MODEL, OTHER.replace(b"name=", b"x=1;NAME=")), "other"),
        ((MODEL, OTHER.replace(b"Content", b"content-disposition: form-data; name=x\r\nContent")), "other"),
        (
            (MODEL, OTHER.replace(b"\r\n\r\n", b"\r\ncontent-disposition: form-data; name=x\r\n\r\n")),
            "whisper-é",
        ),
        ((MODEL, OTHER.replace(b'"model"', b'model; name="x"')), "whisper-é"),
        ((MODEL, OTHER.replace(b'"model"', b"x; name*=utf-8''model")), "whisper-é"),
        ((MODEL, OTHER.replace(b'"model"', b"Model")), "whisper-é"),
        # In the content of a file: no line begins with the boundary, or it goes on.
        ((MODEL, FAKE + b"--cut\r\n" + OTHER), "whisper-é"),
        ((MODEL, FAKE[:-1] + b"--cut\r\n" + OTHER), "whisper-é"),
        # The name of a file may be long.
        ((FILE.replace(b'"model"', b'"%s"' % (b"; model" * 30)), MODEL), "whisper-é"),
    ],
)
async def test_the_field_of_a_form_is_the_one_that_vllm_takes(
    parts: tuple[bytes, ...], model: str | None
) -> None:
    for body in (form(*parts), form(*parts) + form(OTHER), b"\r\n" + form(*parts)):
        for type in (CUT, 'Multipart/Form-Data; Boundary="cut"'):
            found = await taken(body, type)
            assert found is not None
            assert found.get("model") == form_facts(body, type).model == model


FORM_FIELD = st.tuples(
    st.sampled_from([b"name", b"x=1; name", b"NAME", b"name*", b"filename=a; name"]),
    st.sampled_from([b"model", b'"model"', b'"n"', b'"mo\\del"', b'"max_completion_tokens"', b"file", b""]),
    st.sampled_from([b"\r\n\r\n", b"\r\ncontent-type: text/plain\r\n\r\n", b"\n\n", b"\r\n"]),
    st.sampled_from([b"2", b"demo", b"--cut\r\n", b"\r\n--cutter", b"", b"\xff", b"\r\n--cut--"]),
).map(lambda part: b"content-disposition: form-data; %s=%s%s%s" % part)


FILE_INSTEAD = [
    b"content-disposition: form-data; %sname=model\r\n\r\n2" % file for file in (b"", b"filename=a; ")
]


@example(FILE_INSTEAD, b"", 0)
# The file doesn't end.
@example([b"content-disposition: form-data; name=model\r\n\r\n2", FILE_INSTEAD[1] + b"--cut--"], b"", -3)
@example([FILE_INSTEAD[0], b"content-disposition: form-data; filename=a; name=model\r\n\r\n--cut--"], b"", -3)
@given(
    st.lists(FORM_FIELD, max_size=4),
    st.sampled_from([b"", b"\r\n", b"x", b"\r\n--cut \t\r\n"]),
    st.integers(-3, 0),
)
async def test_no_field_of_a_form_is_read_for_less_than_vllm_reads(
    parts: list[bytes], start: bytes, cut: int
) -> None:
    body = start + form(*parts)
    body = body[: len(body) + cut]
    found = await taken(body, CUT)
    facts = looked(body, SPEECH, content_type=CUT)
    if found is not None and facts is not None:
        model = found.get("model") or None
        assert facts.model == model or (model and "ÿ" in model)
        assert facts.answers >= int(found.get("n") or 1)
        assert (facts.prompt, facts.prompts) == (None, 1)


@pytest.mark.parametrize(
    ("body", "type"),
    [
        (b"", CUT),
        (b"", ""),
    ],
)
def test_a_form_without_a_model_has_the_one_of_the_query(body: bytes, type: str) -> None:
    assert form_facts(body, type).model is None
    assert form_facts(body, type, model="named").model == "named"


@pytest.mark.parametrize("type", ["multipart/form-data", "text/plain; boundary=cut", "a/b"])
def test_a_route_takes_bodies_of_its_type_alone(type: str) -> None:
    with pytest.raises(RequestError, match=r"^content-type: must be multipart/form-data"):
        form_facts(form(MODEL), type)
    with pytest.raises(RequestError, match=r"^content-type: must be application/json"):
        inspect(b"{}", CHAT, LIMITS, content_type=type)


@pytest.mark.parametrize(
    "parameter", ["boundary*=x; boundary*0=y", "x*=1; x*0=2", f"x*{'1' * 5000}=2", "boundary*=utf-8''other"]
)
async def test_parameters_of_a_type_that_vllm_leaves_out_are_left_out_here(parameter: str) -> None:
    type = f"multipart/form-data; {parameter}; boundary=cut"
    assert await taken(form(MODEL), type) == {"model": "whisper-é"}
    assert form_facts(form(MODEL), type).model == "whisper-é"


@pytest.mark.parametrize(
    ("body", "type", "param"),
    [
        (form(MODEL.replace(b"\r\n\r\n", b"\r\nx: " + b"x" * 5000 + b"\r\n\r\n")), CUT, None),
        (form(MODEL.replace(b"\r\n\r\n", b"; " * 33 + b"\r\n\r\n")), CUT, None),
        (form(DISPOSITION + b"x\r\n\r\n") * 2_001, CUT, None),
        (form(*[DISPOSITION + b"x\r\n\r\n"] * 2_001), CUT, None),
        (form(DISPOSITION + b"n\r\n\r\n" + b"1" * 5000), CUT, "n"),
        (form(DISPOSITION + b"n\r\n\r\n129"), CUT, "n"),
        (form(MODEL), f"multipart/form-data; boundary={'x' * 71}", "content-type"),
        # Decoded with it, other names would come out.
        (form(MODEL), f"{CUT}; charset=cp037", "content-type"),
    ],
)
def test_a_form_beyond_the_bounds_is_refused(body: bytes, type: str, param: str | None) -> None:
    if body.count(b"--cut--") > 1:
        assert form_facts(body, type).model is None
        return
    with pytest.raises(RequestError) as caught:
        form_facts(body, type)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
    assert caught.value.param == param


def test_a_form_that_can_not_be_read_is_refused_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RequestError, match=r"^The form can't be read"):
        form_facts(b"--cut\r\nno header\r\n\r\n")
    assert caplog.records == []


def test_a_boundary_may_be_as_long_as_the_standard_allows() -> None:
    body = form(MODEL).replace(b"cut", b"x" * 70)
    assert form_facts(body, f"multipart/form-data; boundary={'x' * 70}").model == "whisper-é"


def test_a_form_is_estimated_without_its_bytes() -> None:
    facts = form_facts(form(FILE.replace(b"\xff", b"\xff" * 9_000), DISPOSITION + b"n\r\n\r\n2"))
    assert (facts.prefix, facts.tokens, facts.answers, facts.prompt) == ((), 2 * 256, 2, None)
    assert facts.size > 9_000


@given(st.binary(max_size=60), st.text(max_size=40))
def test_no_form_and_no_type_break_the_look(body: bytes, type: str) -> None:
    for content, kind in ((form(body), CUT + type), (body, type)):
        looked(content, SPEECH, content_type=kind)


# Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newer(PickledByName):
    """`Facts` of a later version: a field is new, and others have gone."""

    unheard_of: int = 3
    size: int = 0
    model: str | None = None


def test_replicas_of_two_versions_understand_each_other() -> None:
    facts = facts_of(CHAT, model="demo", messages=chat(LONG), n=2)
    assert pickle.loads(pickle.dumps(facts)) == facts
    rebuild, (_, values) = facts.__reduce__()
    newer = rebuild(_Newer, values)
    assert newer == _Newer(size=facts.size, model="demo")
    rebuild, (_, values) = _Newer(size=7, model="demo").__reduce__()
    assert rebuild(Facts, values) == Facts(size=7, model="demo")


# Time


def seconds(call: Callable[[], object]) -> float:
    """Return the least seconds of this process that a call takes."""
    found = []
    for _ in range(3):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


UNITS = ("{}", "[]", '""', "[1]", '{"a":[]}', "null", '"\\\\"', '"\\ud83d\\ude00"', "NaN", '"a": [{}]')


def values(unit: str) -> str:
    """Return a value again and again, in a text of 1 MiB."""
    return ",".join([unit] * (MIB // (len(unit) + 1)))


@pytest.fixture(scope="module")
def parser_s() -> float:
    """The seconds that a parser takes for 1 MiB of empty objects."""
    control = f"[{values('{}')}]"
    return seconds(lambda: json.loads(control))


@pytest.mark.parametrize("unit", UNITS)
def test_many_values_take_less_time_than_a_parser_takes_for_empty_objects(unit: str, parser_s: float) -> None:
    body = f"{{{values(unit)}}}" if ": " in unit else f'{{"messages": [{values(unit)}]}}'
    assert seconds(lambda: looked(body.encode(), CHAT)) < parser_s


@pytest.mark.parametrize(
    ("head", "times"),
    [
        (b"--cut\r\n" + b"content-disposition:" * 200 + b"\r\n\r\n", 2_000),
        (b"--cut\r\n" + DISPOSITION + b"model" + b"; x" * 30 + b"\r\n\r\n\r\n", 2_000),
        (b"--cut\r\n" + DISPOSITION + b"model" + b"; " * 2_000 + b"\r\n\r\n", 2_000),
        (b"--cut\r\n\r\n\r\n", 700_000),
    ],
)
def test_a_hostile_form_takes_no_longer_than_one_of_many_fields(head: bytes, times: int) -> None:
    honest = form(*[DISPOSITION + b'"model"\r\n\r\n' + b"demo"] * 2_000)
    hostile = head * times
    look = partial(looked, path=SPEECH, content_type=CUT)
    assert seconds(lambda: look(hostile)) < 10 * seconds(lambda: look(honest))
