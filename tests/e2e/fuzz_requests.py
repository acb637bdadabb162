"""Hypothesis strategies for requests to every route, from nearly right to nonsense."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from serve_app.api.protocol import GenerateRequest, ProcessRequest

QUESTION = "What is 1+1?"
CHAT = [{"role": "user", "content": QUESTION}]
FUNCTION = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def _words(text: str) -> list[str]:
    return text.split()


COMMON = _words(
    """model stream temperature top_p seed stop n user service_tier logit_bias logprobs presence_penalty
    frequency_penalty top_k min_p min_tokens ignore_eos stop_token_ids repetition_penalty length_penalty
    best_of use_beam_search skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    prompt_logprobs
    allowed_token_ids bad_words add_special_tokens response_format structured_outputs guided_json guided_regex
    priority request_id return_token_ids return_tokens_as_token_ids cache_salt kv_transfer_params vllm_xargs
    stream_options include_stop_str_in_output echo suffix logits_processors repetition_detection prompt_embeds
    return_prompt_text"""
)
CHATTY = _words(
    """messages tools tool_choice parallel_tool_calls top_logprobs max_completion_tokens reasoning_effort
    chat_template chat_template_kwargs documents add_generation_prompt continue_final_message
    mm_processor_kwargs include_reasoning media_io_kwargs audio modalities store metadata prediction"""
)
RESPONSES = _words(
    """input instructions tools tool_choice text reasoning background store previous_response_id metadata
    truncation include max_tool_calls top_logprobs prompt enable_response_messages stream"""
)
MESSAGES = _words(
    "messages system tools tool_choice thinking metadata stop_sequences stream temperature top_k"
)
ROUTES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/generate": ({"prompts": [QUESTION], "max_tokens": 4}, list(GenerateRequest.model_fields)),
    "/process": ({"records": [QUESTION], "model": "minilm"}, list(ProcessRequest.model_fields)),
    "/v1/completions": ({"model": "demo", "prompt": QUESTION, "max_tokens": 4}, ["prompt", *COMMON]),
    "/v1/chat/completions": ({"model": "demo", "messages": CHAT, "max_tokens": 4}, [*CHATTY, *COMMON]),
    "/v1/chat/completions/batch": (
        {"model": "demo", "messages": [CHAT], "max_tokens": 4},
        [*CHATTY, *COMMON],
    ),
    "/v1/responses": (
        {"model": "demo", "input": QUESTION, "max_output_tokens": 4},
        [*RESPONSES, *COMMON],
    ),
    "/v1/messages": (
        {"model": "demo", "messages": CHAT, "max_tokens": 4},
        MESSAGES,
    ),
    "/v1/messages/count_tokens": ({"model": "demo", "messages": CHAT}, ["messages", "system", "tools"]),
    "/v1/embeddings": (
        {"model": "minilm", "input": QUESTION},
        ["input", "model", "encoding_format", "dimensions", "user"],
    ),
    "/v1/tokenize": (
        {"model": "demo", "prompt": QUESTION},
        ["prompt", "messages", "add_special_tokens", "return_token_strs", "chat_template", "tools"],
    ),
    "/v1/detokenize": ({"model": "demo", "tokens": [5, 6]}, ["tokens", "model"]),
}
TELLING: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 17, 0.0, -0.0, 0.5, 1e-9, 1e308, -1e308, 5.5),
    *(2**31, 2**63, -(2**63), 2**64, 10**400, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "\x00", "\ud800", "名前", "a" * 5000, "\n" * 100),
    *("{{ 7*7 }}", "{% for %}", "(", "[", "(a+)+$"),
    *("auto", "none", "required", "default", "flex", "priority", "json_object", "text", "demo", "minilm"),
    *([], {}, [[]], [None], [{}], [0], [-1], [10**9], [2**63], ["a"], ["a", 1], [[0, 1]], [[[]]], [""]),
    *({"": None}, {"a": "b"}, {"-1": 1}, {"5": 100}, {"x": 1}, {"type": "json_object"}, {"type": "regex"}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}},
    {"json": {"$ref": "#"}},
    {"json": "{"},
    {"regex": "("},
    {"regex": "[0-9]{1,3}"},
    {"grammar": "root ::="},
    {"choice": []},
    {"choice": ["a", "b"]},
    {"type": "function", "function": {"name": "add"}},
    {"include_usage": True, "continuous_usage_stats": True},
    [FUNCTION],
    [{"type": "function", "function": {"name": "", "parameters": {"type": "nothing"}}}],
    CHAT,
    [CHAT],
    [{"role": "user", "content": None}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}],
    [{"role": "tool", "content": "x"}],
    [{"role": "system", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}]}],
    [{"role": "nobody", "content": QUESTION}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    [{"type": "function_call_output", "call_id": "x", "output": "y"}],
]  # fmt: skip
HEADERS: list[tuple[str, list[bytes]]] = [
    ("content-type", [b"text/plain", b"", b"application/json; charset=utf-7", b"\xff", b"json"]),
    ("x-tenant", [b"a", b"", b"\xff", b"a" * 500]),
    ("x-queue-timeout-seconds", [b"5", b"0", b"nan", b"1e999", b"\xff"]),
    ("x-request-id", [b"a", b"same", b"\xff", b"a" * 500]),
    ("x-request-timeout-seconds", [b"30", b"-1", b"x", b"\xff"]),
    ("x-session-id", [b"\xff"]),
    ("accept", [b"text/event-stream", b"\xff"]),
    ("accept-encoding", [b"gzip", b"nonsense"]),
    ("x-data-parallel-rank", [b"7", b"x"]),
    ("endpoint-load-metrics-format", [b"json", b"x"]),
    ("traceparent", [b"x", b"\xff"]),
    ("x-amzn-sagemaker-session-id", [b"NEW_SESSION", b"x"]),
    ("x-amzn-sagemaker-adapter-identifier", [b"x"]),
]  # fmt: skip


@dataclass(frozen=True)
class FuzzRequest:
    """One request."""

    path: str
    body: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    method: str = "POST"


def dump(body: object) -> bytes:
    """Return JSON, with NaN and infinity as Python writes them."""
    return json.dumps(body).encode()


values = st.recursive(
    st.sampled_from(TELLING) | st.text(max_size=20) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def bounded(body: Any) -> Any:
    """Let no request run for long: a fuzzer's prompts make the model ramble."""
    if isinstance(body, dict):
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if field in body and (body[field] is None or (isinstance(body[field], int) and body[field] > 8)):
                body[field] = 8
        if body.get("min_tokens"):
            body["min_tokens"] = 2
    return body


@st.composite
def _changed(draw: st.DrawFn, path: str) -> bytes:
    """A right request with a few fields changed, left out or added."""
    body, fields = ROUTES[path]
    body = dict(body)
    for _ in range(draw(st.integers(0, 3))):
        field = draw(st.sampled_from(fields))
        body[field] = draw(values)
    if draw(st.integers(0, 9)) == 0:
        del body[draw(st.sampled_from(sorted(body)))]
        body.setdefault("max_tokens", 4)
    return dump(bounded(body))


@st.composite
def _broken(draw: st.DrawFn, path: str) -> bytes:
    """A right request, of which some bytes were changed."""
    data = bytearray(dump(ROUTES[path][0]))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
        if not data:
            break
    return bytes(data)


@st.composite
def fuzz_requests(draw: st.DrawFn) -> FuzzRequest:
    """Requests to all routes."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    kind = draw(st.integers(0, 9))
    if kind < 7:
        body = draw(_changed(path))
    elif kind < 9:
        body = draw(_broken(path))
    else:
        body = draw(st.binary(max_size=50) | values.map(dump))
    headers: dict[str, bytes] = {"content-type": b"application/json"}
    if draw(st.integers(0, 3)) == 0:
        name, choices = draw(st.sampled_from(HEADERS))
        headers[name] = draw(st.sampled_from(choices))
    return FuzzRequest(path, body, tuple(headers.items()))
