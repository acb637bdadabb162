"""OpenAI's `/v1/embeddings`: its request, its answer, and what is refused."""

import base64
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.embeddings import embedding_response, parse_embedding
from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def refusal(body: bytes | JSON) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_embedding(body, max_texts=3)
    assert caught.value.status == 400
    return caught.value


def test_one_text_or_several() -> None:
    assert parse_embedding(b'{"input": "a"}', max_texts=3).input == ["a"]
    assert parse_embedding({"input": ["a", "b"]}, max_texts=3).input == ["a", "b"]


def test_all_that_the_openai_client_may_send_is_taken() -> None:
    body = {
        "input": "a",
        "model": "m",
        "encoding_format": "base64",
        "dimensions": 2,
        "user": "u",
        "service_tier": "flex",
    }
    assert parse_embedding(body, max_texts=3).model == "m"


@pytest.mark.parametrize("tokens", [[1, 2], [[1, 2], [3]]])
def test_tokens_are_refused_with_what_to_send_instead(tokens: object) -> None:
    error = refusal({"input": tokens})
    assert error.param == "input"
    assert "send text" in error.message
    assert "check_embedding_ctx_length=False" in error.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 4}, "input"),
        ({"input": ["a", None]}, "input[1]"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate": 5}, "truncate"),
    ],
)
def test_a_wrong_field_is_named(change: JSON, param: str) -> None:
    assert refusal({"input": "a"} | change).param == param
    assert refusal(b"[]").param is None


def answer(vectors: list[Any], tokens: int = 5, **fields: Any) -> JSON:
    request = parse_embedding({"input": ["x"] * len(vectors), **fields}, max_texts=20)
    response = embedding_response(request, "m", vectors, tokens)
    return response | {"data": list(response["data"])}


def test_the_answer_has_openais_shape() -> None:
    assert answer([[1.0, 0.5], [0.0, -1.0]]) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [0.0, -1.0]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_base64_is_little_endian_float32(vector: list[float]) -> None:
    (item,) = answer([vector], encoding_format="base64")["data"]
    assert list(struct.unpack(f"<{len(vector)}f", base64.b64decode(item["embedding"]))) == vector


def test_the_length_of_the_vectors_can_be_asked_for_but_not_changed() -> None:
    assert answer([[1.0, 0.5]], dimensions=2)["data"]
    with pytest.raises(RequestError, match="this model's vectors have 2, not 3") as caught:
        answer([[1.0, 0.5]], dimensions=3)
    assert (caught.value.status, caught.value.param) == (400, "dimensions")


@pytest.mark.parametrize("vectors", [[0.5], [None], [["a"]], [[None]], [[[1.0]]]])
def test_results_that_are_no_vectors_are_the_model_s_error(vectors: list[Any]) -> None:
    with pytest.raises(RequestError) as caught:
        answer(vectors, encoding_format="base64")
    assert (caught.value.status, caught.value.type) == (500, "internal_error")
