"""No request is answered with a 500 or never."""

import json

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "What is 1+1?"}]
CHAT = {"model": "demo", "messages": MESSAGES}


def error(response: httpx.Response, status: int) -> tuple[str, str | None]:
    """Return message and param of an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"], body["error"]["param"]


def test_no_prompts(http: httpx.Client) -> None:
    assert error(http.post("/generate", json={"prompts": []}), 400) == ("No prompts provided", "prompts")


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/tokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 10_000])
def test_not_a_json_object(http: httpx.Client, path: str, body: bytes) -> None:
    message, _ = error(http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompts", "one"),
        ("prompts", [1]),
        ("prompts", None),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("seed", 2**64),
        ("stop", 5),
        ("model", 7),
        ("details", "perhaps"),
        ("no_such_field", 1),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, field: str, value: object) -> None:
    message, param = error(http.post("/generate", json={"prompts": ["What is 1+1?"], field: value}), 400)
    assert field in message
    assert param
    assert param.startswith(field)


def test_unknown_model(http: httpx.Client) -> None:
    message, param = error(http.post("/generate", json={"prompts": ["x"], "model": "gpt"}), 404)
    assert message == "The model 'gpt' does not exist; served here: demo, minilm"
    assert param == "model"


def test_a_prompt_that_is_too_long_is_named_with_its_length_and_the_limit(http: httpx.Client) -> None:
    message, param = error(http.post("/generate", json={"prompts": ["What is 1+1?", "1" * 3000]}), 400)
    assert param == "prompts[1]"
    assert "3000 tokens" in message
    assert "2047" in message


def test_max_tokens_beyond_the_context(http: httpx.Client) -> None:
    message, _ = error(http.post("/generate", json={"prompts": ["What is 1+1?"], "max_tokens": 3000}), 400)
    assert "max_tokens" in message
    assert "2048" in message


def test_too_many_prompts(http: httpx.Client) -> None:
    message, param = error(http.post("/generate", json={"prompts": ["x"] * 10_001}), 400)
    assert param == "prompts"
    assert "10000" in message


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_body_over_the_limit(http: httpx.Client, path: str) -> None:
    limit = 32 * 1024 * 1024
    message, _ = error(http.post(path, content=b" " * (limit + 1)), 413)
    assert str(limit) in message
    # The same without a length to refuse it by.
    pieces = (b" " * 2**20 for _ in range(33))
    error(http.post(path, content=pieces), 413)


def test_no_such_path_or_method(http: httpx.Client) -> None:
    error(http.get("/v1/nothing"), 404)
    error(http.get("/nothing"), 404)
    error(http.get("/generate"), 405)
    error(http.get("/v1/chat/completions"), 405)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"max_tokens": -1},
        {"max_tokens": 10**6},
        {"n": 0},
        {"temperature": "hot"},
        {"top_p": 7},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
        {"tools": [{"type": "function"}]},
        {"logprobs": True, "top_logprobs": 10**6},
        {"stop": 3},
        {"stream": "maybe"},
    ],
)
def test_a_wrong_chat_request_is_a_400(http: httpx.Client, change: dict[str, object]) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | change)
    message, param = error(response, 400)
    assert message
    assert param is None or "body" not in param
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_text_that_is_empty_or_fills_the_context_is_named(http: httpx.Client) -> None:
    body = {"model": "demo", "prompt": ["a", ""], "max_tokens": 1}
    message, param = error(http.post("/v1/completions", json=body), 400)
    assert (message, param) == ("prompt[1]: the text is empty", "prompt[1]")
    counted = http.post("/v1/messages/count_tokens", json=CHAT).json()["input_tokens"]
    content = MESSAGES[0]["content"] + "1" * (2048 - counted)
    body = CHAT | {"messages": [{"role": "user", "content": content}]}
    response = http.post("/v1/chat/completions", json=body)
    assert "maximum context length" in error(response, 400)[0]
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_refusal_of_a_stream_comes_before_the_stream(http: httpx.Client) -> None:
    body = CHAT | {"stream": True, "max_tokens": 10**6}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 400
        assert json.loads(response.read())["error"]["message"]


def around(part: object) -> dict[str, object]:
    """Return a schema with a part that is wrong."""
    return {"type": "object", "properties": {"a": part}, "required": ["a"]}


CYCLE: dict[str, object] = {
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    "$ref": "#/$defs/a",
}
SCHEMAS: list[tuple[dict[str, object], str]] = [
    (
        around({"type": "array", "items": [{"type": "string"}]}),
        "items must be a boolean or an object",
    ),
    (around({"type": "string", "pattern": "\\p{L}+"}), "not supported yet"),
    (around({"type": "string", "pattern": "("}), "The parenthesis is not closed"),
    (around({"$ref": "#/$defs/none"}), "Cannot find field $defs in #/$defs/none"),
    (CYCLE, "leads to itself"),
]
"""Schemas that xgrammar doesn't compile, and its reasons."""


def with_schema(path: str, schema: object) -> dict[str, object]:
    """Return the body of a request whose answer has to follow a schema."""
    kind = {"type": "json_schema", "schema": schema}
    match path:
        case "/v1/chat/completions":
            return CHAT | {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            }
        case "/v1/completions":
            return {"model": "demo", "prompt": "a", "structured_outputs": {"json": schema}}
        case "/v1/responses":
            return {"model": "demo", "input": "a", "text": {"format": kind | {"name": "x"}}}
        case _:
            return {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "output_config": {"format": kind}}


FIELDS = {
    "/v1/chat/completions": "response_format",
    "/v1/completions": "structured_outputs.json",
    "/v1/responses": "text.format",
    "/v1/messages": "output_config.format",
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", list(FIELDS))
def test_a_schema_that_can_not_be_compiled_is_a_400_with_the_reason(
    http: httpx.Client, path: str, stream: bool
) -> None:
    for schema, reason in SCHEMAS:
        response = http.post(path, json=with_schema(path, schema) | {"stream": stream})
        if path == "/v1/messages":
            assert response.status_code == 400, response.text
            answered = response.json()
            assert (answered["type"], answered["error"]["type"]) == ("error", "invalid_request_error")
            message = answered["error"]["message"]
        else:
            message, param = error(response, 400)
            assert param == FIELDS[path]
        assert f"{FIELDS[path]}: this json can't be compiled: " in message
        assert reason in message


def tools(schema: object, **more: object) -> dict[str, object]:
    # The arguments of any other tool follow no schema.
    function = {"name": "f", "parameters": schema, "strict": True}
    other = {"name": "g", "parameters": around({"type": "string"})}
    return {"tools": [{"type": "function", "function": each} for each in (other, function)], **more}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            tools(SCHEMAS[0][0], tool_choice="required"),
            f"tools: this schema can't be compiled: {SCHEMAS[0][1]}",
        ),
        (
            {"structured_outputs": {"regex": "(?=a)b"}},
            "structured_outputs.regex: this regex can't be compiled",
        ),
        ({"structured_outputs": {"grammar": "start: x"}}, "unknown name 'x'"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "EBNF parser error at line 1"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "no text matches it"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural"),
    ],
)
def test_any_other_grammar_that_can_not_be_compiled_is_a_400_with_the_reason(
    http: httpx.Client, fields: dict[str, object], said: str, stream: bool
) -> None:
    message, _ = error(http.post("/v1/chat/completions", json=CHAT | fields | {"stream": stream}), 400)
    assert said in message


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]},
        {"type": "integer", "multipleOf": 5},
        around({"$ref": "#/$defs/a"}) | {"$defs": {"a": {"type": "integer"}}},
    ],
)
def test_a_schema_that_vllm_takes_is_served(http: httpx.Client, schema: dict[str, object]) -> None:
    body = with_schema("/v1/chat/completions", schema) | {"max_tokens": 8}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


def test_a_tool_that_no_answer_has_to_follow_may_have_any_schema(http: httpx.Client) -> None:
    body = CHAT | tools(SCHEMAS[0][0], tool_choice="none", max_tokens=8)
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_all_errors_of_anthropic_s_routes_have_its_shape(http: httpx.Client, path: str) -> None:
    right = {"model": "demo", "messages": MESSAGES, "max_tokens": 8}
    refused = {
        "not JSON": (http.post(path, content=b"{"), 400, "invalid_request_error"),
        "no messages": (http.post(path, json=right | {"messages": 5}), 400, "invalid_request_error"),
        "a wrong role": (
            http.post(path, json=right | {"messages": [{"role": "nobody", "content": "a"}]}),
            400,
            "invalid_request_error",
        ),
        "too long": (
            http.post(path, json=right | {"messages": [{"role": "user", "content": "1" * 30_000}]}),
            400,
            "invalid_request_error",
        ),
        "no such model": (http.post(path, json=right | {"model": "gpt"}), 404, "not_found_error"),
        "no such method": (http.get(path), 405, "invalid_request_error"),
        "too large": (http.post(path, content=b" " * (2**25 + 1)), 413, "request_too_large"),
        "encoded": (
            http.post(path, json=right, headers={"content-encoding": "br"}),
            415,
            "invalid_request_error",
        ),
    }
    for name, (response, status, kind) in refused.items():
        assert response.status_code == status, (name, response.text)
        body = response.json()
        assert (set(body), body["type"], body["error"]["type"]) == ({"type", "error"}, "error", kind), name
        assert body["error"]["message"], name


def test_the_service_still_answers(http: httpx.Client) -> None:
    """Runs after the others of this file: none of them did harm."""
    assert http.post("/generate", json={"prompts": ["What is 1+1?"]}).json()["results"] == ["2"]
