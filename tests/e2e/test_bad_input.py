"""No request is answered with a 500 or never."""

import json

import httpx
import pytest

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is 1+1?"}]}


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
    message, _ = error(http.post("/v1/chat/completions", json=CHAT | change), 400)
    assert message


def test_a_refusal_of_a_stream_comes_before_the_stream(http: httpx.Client) -> None:
    body = CHAT | {"stream": True, "max_tokens": 10**6}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 400
        assert json.loads(response.read())["error"]["message"]


def test_the_service_still_answers(http: httpx.Client) -> None:
    """Runs after the others of this file: none of them did harm."""
    assert http.post("/generate", json={"prompts": ["What is 1+1?"]}).json()["results"] == ["2"]
