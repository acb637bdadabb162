"""The most tokens of a request, from its body."""

import json
from typing import Any

import pytest

from serve_app.api.token_bound import NOTHING, TEMPLATE_TOKENS, TokenDemand
from serve_app.ingress.limits import read_call, read_json, read_openai
from serve_app.ingress.token_demand import call_demand, openai_demand
from serve_app.settings.ingress import IngressSettings

LIMITS = IngressSettings()
CHAT = "/v1/chat/completions"


def demand_of(path: str, limits: IngressSettings = LIMITS, **fields: Any) -> tuple[TokenDemand, int]:
    """Return the demand of a request and the bytes of its body."""
    body = json.dumps(fields).encode()
    content = read_json(body, limits)
    return openai_demand(content, read_openai(content, path, limits), path, body, limits), len(body)


def test_a_prompt_has_no_more_tokens_than_its_body_has_bytes() -> None:
    demand, size = demand_of(CHAT, messages=[{"role": "user", "content": "hello"}], max_tokens=7)
    assert demand == TokenDemand(size + TEMPLATE_TOKENS, 1, 1, 7)


@pytest.mark.parametrize(
    "part", ["image_url", "input_audio", "video_url", "image_embeds", "audio_embeds", "video_embeds"]
)
def test_bytes_say_nothing_about_media(part: str) -> None:
    messages = [{"role": "user", "content": [{"type": part, part: {"url": "https://x/y"}}]}]
    demand, _ = demand_of(CHAT, messages=messages, max_tokens=7)
    assert demand.prompt is None
    said, _ = demand_of(CHAT, messages=[{"role": "user", "content": f"an {part}"}])
    assert said.prompt is not None


@pytest.mark.parametrize("name", ["image\\u005furl", "\\u0069mage_url", "image_ur\\u006C"])
def test_media_do_not_hide_behind_escapes(name: str) -> None:
    text = f'{{"messages": [{{"role": "user", "content": [{{"type": "{name}", "{name}": "https://x/y"}}]}}]}}'
    body = text.encode()
    content = read_json(body, LIMITS)
    assert openai_demand(content, read_openai(content, CHAT, LIMITS), CHAT, body, LIMITS).prompt is None


def test_escapes_that_encoders_write_are_no_media() -> None:
    demand, _ = demand_of(CHAT, messages=[{"role": "user", "content": "é世\x00\x1f\x7f\U0001f600"}])
    assert demand.prompt is not None


def test_the_limit_that_the_route_reads_counts() -> None:
    demand, _ = demand_of(CHAT, messages=[], max_tokens=9, max_completion_tokens=7, max_output_tokens=1, n=3)
    assert (demand.answers, demand.output) == (3, 7)
    assert demand_of(CHAT, messages=[], max_tokens=9, max_output_tokens=1)[0].output == 9
    assert demand_of("/v1/responses", input="a", max_tokens=9, max_output_tokens=1)[0].output == 1
    assert demand_of("/v1/completions", prompt="a", max_completion_tokens=1)[0].output is None


def test_without_a_limit_the_context_counts_or_that_of_the_config() -> None:
    assert demand_of(CHAT, messages=[])[0].output is None
    assert demand_of(CHAT, IngressSettings(max_tokens=50), messages=[])[0].output == 50


def test_each_prompt_of_a_list_has_answers_of_its_own() -> None:
    demand, size = demand_of("/v1/completions", prompt=["a", "b", "c"], n=2, best_of=4, max_tokens=5)
    assert demand == TokenDemand(size + 3 * TEMPLATE_TOKENS, 3, 4, 5)
    tokens, _ = demand_of("/v1/completions", prompt=[1, 2, 3], max_tokens=5)
    assert tokens.prompts == 1


def test_routes_without_answers_reserve_none() -> None:
    demand, size = demand_of("/v1/embeddings", input=["a", "b"])
    assert demand == TokenDemand(size + 2 * TEMPLATE_TOKENS, 2, 1, 0)
    assert demand_of("/v1/messages/count_tokens", messages=[])[0] is NOTHING


def test_each_chat_of_an_embedding_is_a_prompt() -> None:
    chat = [{"role": "user", "content": "hi"}]
    demand, size = demand_of("/v1/embeddings", messages=[chat, chat, chat])
    assert demand == TokenDemand(size + 3 * TEMPLATE_TOKENS, 3, 1, 0)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_a_query_counts_once_for_each_document(path: str) -> None:
    demand, size = demand_of(path, query="q", documents=["a", "b", "c"])
    assert demand == TokenDemand(3 * (size + TEMPLATE_TOKENS), 3, 1, 0)


def test_classes_of_texts_are_no_answers() -> None:
    demand, size = demand_of("/v1/classify", input=["a", "b"])
    assert demand == TokenDemand(size + 2 * TEMPLATE_TOKENS, 2, 1, 0)


@pytest.mark.parametrize("name", ["prompts", "messages"])
def test_a_call_reserves_for_each_of_its_prompts(name: str) -> None:
    values = ["a", "b"] if name == "prompts" else [[{"role": "user", "content": "a"}]] * 2
    body = json.dumps({name: values, "max_tokens": 9}).encode()
    content = read_json(body, LIMITS)
    fields = read_call(content, LIMITS, "prompts", "messages")
    expected = TokenDemand(len(body) + 2 * TEMPLATE_TOKENS, 2, 1, 9)
    assert call_demand(content, fields, len(body), LIMITS) == expected
