"""The unmodified `openai` client against the service."""

import json

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

QUESTION = "What is 47+28?"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=CHAT, temperature=0)
    assert answer.choices[0].message.content == "75"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.completion_tokens == 3


def test_streaming_chat_sends_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "75"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 3


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=[QUESTION, "What is 12-40?"], temperature=0, max_tokens=8
    )
    assert [choice.text for choice in answer.choices] == ["75", "-28"]


def test_streaming_completions(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="demo", prompt=QUESTION, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "75"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs
    tokens = answer.choices[0].logprobs.content
    assert tokens
    assert [token.token for token in tokens][:2] == ["7", "5"]
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


def test_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=CHAT, n=2, temperature=0.01, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["75", "75"]


def test_stop_string(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, stop=["5"])
    assert answer.choices[0].message.content == "7"
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=QUESTION, temperature=0, max_tokens=1)
    assert answer.choices[0].text == "7"
    assert answer.choices[0].finish_reason == "length"


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sign": {"enum": ["plus", "minus"]}, "exact": {"type": "boolean"}},
        "required": ["sign", "exact"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="demo",
        messages=CHAT,
        max_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": schema, "strict": True},
        },
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value["sign"] in {"plus", "minus"}
    assert isinstance(value["exact"], bool)


def test_a_named_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"sign": {"enum": ["plus", "minus"]}},
        "required": ["sign"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="demo",
        messages=CHAT,
        max_tokens=200,
        tools=[
            {
                "type": "function",
                "function": {"name": "calculate", "parameters": parameters, "strict": True},
            }
        ],
        tool_choice={"type": "function", "function": {"name": "calculate"}},
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "calculate"
    assert json.loads(calls[0].function.arguments)["sign"] in {"plus", "minus"}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "minilm"]
    assert client.models.retrieve("demo").id == "demo"


def test_tokenize_and_back(http: httpx.Client) -> None:
    tokens = http.post("/v1/tokenize", json={"model": "demo", "prompt": QUESTION}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    text = http.post("/v1/detokenize", json={"model": "demo", "tokens": tokens["tokens"]}).json()
    assert text["prompt"] == QUESTION


def test_unknown_model_is_404_and_names_the_models(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'nope' does not exist; served here: demo, minilm"):
        client.chat.completions.create(model="nope", messages=CHAT)
    with pytest.raises(openai.NotFoundError, match="served here: demo, minilm"):
        client.models.retrieve("nope")


def test_wrong_type_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=CHAT, temperature="hot")  # type: ignore[call-overload]


def test_prompt_beyond_the_context_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="demo", prompt="1" * 3000)


def test_max_tokens_beyond_the_context_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="demo", prompt=QUESTION, max_tokens=4000)


def test_errors_have_openais_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.get("/no/such/path", cast_to=object)
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
