"""Requests over HTTP and the handle: a bad one is refused with a 400 that names the field."""

import json
import math
import re
import time
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from serve_app.api.errors import RequestError
from serve_app.api.protocol import (
    JSON,
    GenerateRequest,
    GenerateResponse,
    ProcessRequest,
    SamplingFields,
    Usage,
    parse_generate,
    parse_process,
)
from serve_app.api.scheduling import DEFAULT_SCHEDULING

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(GenerateRequest.model_fields)


def refusal(body: bytes | JSON, max_prompts: int = 10) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_generate(body, max_prompts=max_prompts)
    return caught.value


def outcome(body: bytes | JSON) -> RequestError | None:
    """Return why a body is refused, or None; any other error than a RequestError comes through."""
    try:
        parse_generate(body, max_prompts=2)
    except RequestError as error:
        json.dumps(error.body())
        return error
    return None


# Valid requests


def test_the_smallest_request() -> None:
    request = parse_generate(b'{"prompts": ["a", "b"]}', max_prompts=2)
    assert request.prompts == ["a", "b"]
    assert request.task_id is None
    assert request.model is None
    assert not request.details
    assert not request.partial
    assert request.sampling() == {}


def test_json_text_and_the_object_it_stands_for_are_the_same_request() -> None:
    body: JSON = {
        "prompts": ["a"],
        "task_id": "t",
        "model": "demo",
        "cache_salt": "s",
        "details": True,
        "partial": True,
        "service_tier": "flex",
        "tenant": "t",
        "queue_timeout_s": 1.5,
        "max_tokens": 5,
        "min_tokens": 0,
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0.5,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "seed": -1,
        "stop": ["x", "y"],
        "stop_token_ids": [1, 2],
        "ignore_eos": False,
    }
    assert sorted([*body, "messages"]) == FIELDS
    request = parse_generate(json.dumps(body).encode(), max_prompts=1)
    assert request == parse_generate(body, max_prompts=1)
    assert request.model_dump() == body | {"messages": None}


def test_sampling_holds_only_sampling_fields_that_were_given() -> None:
    request = GenerateRequest(prompts=["a"], task_id="t", model="m", details=True, temperature=0, stop=["x"])
    assert request.sampling() == {"temperature": 0, "stop": ["x"]}


def test_stop_is_one_string_or_a_list() -> None:
    assert parse_generate({"prompts": ["a"], "stop": "x"}, max_prompts=1).stop == ["x"]
    assert parse_generate({"prompts": ["a"], "stop": ["x", "y"]}, max_prompts=1).stop == ["x", "y"]


@pytest.mark.parametrize("text", ["", " ", "é\n\0", "😀" * 1000])
def test_a_prompt_arrives_unchanged(text: str) -> None:
    assert parse_generate(json.dumps({"prompts": [text]}).encode(), max_prompts=1).prompts == [text]


def test_a_request_can_not_be_changed_after_it_was_checked() -> None:
    request = parse_generate(b'{"prompts": ["a"]}', max_prompts=1)
    with pytest.raises(ValueError, match="frozen"):
        request.max_tokens = -1


# Invalid requests


def test_no_prompts() -> None:
    error = refusal(b'{"prompts": []}')
    assert (error.status, error.type, error.message, error.param) == (
        400,
        "invalid_request_error",
        "No prompts provided",
        "prompts",
    )


def test_chats_take_the_place_of_prompts() -> None:
    chat = [{"role": "user", "content": "a"}]
    request = parse_generate({"messages": [chat, chat]}, max_prompts=2)
    assert request.messages == [chat, chat]
    assert request.prompts is None
    for body, message in (
        ({"messages": []}, "No messages provided"),
        ({"messages": [chat] * 11}, "messages: 11 messages in one call, at most 10 are allowed"),
        ({"messages": [chat], "prompts": ["a"]}, "messages: prompts are given too"),
        ({"messages": ["a"]}, "messages[0]: Input should be a valid list"),
        ({"messages": [["a"]]}, "messages[0][0]: Input should be a valid dictionary"),
    ):
        error = refusal(body)
        assert error.message.startswith(message)
        assert (error.param or "").startswith("messages")


def test_prompts_left_out() -> None:
    error = refusal(b'{"task_id": "t"}')
    assert (error.param, error.message) == ("prompts", "prompts: required, but missing")


def test_too_many_prompts_says_how_many_are_allowed() -> None:
    assert len(parse_generate({"prompts": ["a"] * 3}, max_prompts=3).prompts or ()) == 3
    error = refusal({"prompts": ["a"] * 4}, max_prompts=3)
    assert error.status == 400
    assert error.param == "prompts"
    assert "4 prompts" in error.message
    assert "at most 3" in error.message


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("prompt", "did you mean prompts?"),
        ("Prompts", "did you mean prompts?"),
        ("temprature", "did you mean temperature?"),
        ("max_token", "did you mean max_tokens?"),
        ("stopp", "did you mean stop?"),
        ("xyz", "GET /docs lists the fields of each route"),
    ],
)
def test_an_unknown_field_is_named_with_the_closest_ones(name: str, advice: str) -> None:
    error = refusal({"prompts": ["a"], name: 0})
    assert (error.param, error.message) == (name, f"{name}: unknown field; {advice}")


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"', b'[{"prompts": ["a"]}]'])
def test_json_that_is_no_object(body: bytes) -> None:
    error = refusal(body)
    assert (error.status, error.message) == (400, "The body must be a JSON object")


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe", b"{", b'{"prompts": ["a"]} x', b"[" * 100_000, b'{"prompts": ["\\ud800"]}']
)
def test_text_that_is_no_json(body: bytes) -> None:
    error = refusal(body)
    assert error.status == 400
    assert error.message.startswith("The body is not valid JSON: ")


BAD_VALUES: list[tuple[str, Any]] = [
    ("prompts", "a"),
    ("prompts", None),
    ("prompts", {"0": "a"}),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", "many"),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.1),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("stop", 5),
    ("stop_token_ids", 5),
    ("stop", ["x" * 16_384]),
    ("ignore_eos", "perhaps"),
    ("task_id", 5),
    ("model", 5),
    ("service_tier", "best"),
    ("tenant", ""),
    ("queue_timeout_s", 0),
    ("queue_timeout_s", "5"),
    ("details", "perhaps"),
    ("partial", []),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_with_its_field(field: str, value: object) -> None:
    body = {"prompts": ["a"], field: value}
    for error in (refusal(body), refusal(json.dumps(body).encode())):
        assert (error.status, error.type, error.param) == (400, "invalid_request_error", field)
        assert error.message.startswith(f"{field}: ")


def test_a_bad_item_is_named_with_its_index() -> None:
    error = refusal(b'{"prompts": ["a", 5]}')
    assert error.param == "prompts[1]"
    assert error.message.startswith("prompts[1]: ")
    assert refusal({"prompts": ["a"], "stop_token_ids": [1, "x"]}).param == "stop_token_ids[1]"
    assert refusal({"prompts": ["a"], "stop": ["x", 5]}).param == "stop[1]"


def test_too_many_stop_strings_says_how_many_are_allowed() -> None:
    error = refusal({"prompts": ["a"], "stop": ["x"] * 65})
    assert error.param == "stop"
    assert "64" in error.message


def test_a_boolean_is_no_number() -> None:
    for field in ("max_tokens", "seed", "top_k", "temperature"):
        assert refusal(json.dumps({"prompts": ["a"], field: True}).encode()).param == field


@given(st.binary())
@example(b'{"prompts": ["a"], "": 1}')
def test_arbitrary_bytes_raise_nothing_but_a_request_error(body: bytes) -> None:
    error = outcome(body)
    assert error is None or error.status == 400


@given(ANY_JSON)
def test_arbitrary_json_raises_nothing_but_a_request_error(value: Any) -> None:
    for body in (json.dumps(value).encode(), value):
        error = outcome(body)
        assert error is None or error.status == 400


@given(field=st.sampled_from(FIELDS), value=ANY_JSON)
def test_a_field_that_is_refused_is_named(field: str, value: Any) -> None:
    error = outcome(json.dumps({"prompts": ["a"]} | {field: value}).encode())
    # A surrogate half in a string is no JSON, wherever it is.
    if error and not error.message.startswith("The body is not valid JSON"):
        assert error.param is not None
        assert error.param.partition("[")[0] == field
        assert error.message.startswith(field) or error.message == f"No {field} provided"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name not in FIELDS))
@example("str")
@example("prompts[0]")
@example("list[str]")
def test_an_unknown_field_is_always_named(name: str) -> None:
    error = refusal(json.dumps({"prompts": ["a"], name: 1}).encode())
    assert error.param == name
    assert error.message.startswith(f"{name}: unknown field")


def test_an_unknown_field_without_a_name_is_not_reported_as_a_body_that_is_no_object() -> None:
    error = refusal(b'{"prompts": ["a"], "": 1}')
    assert "unknown field" in error.message


def test_a_field_with_an_endless_name_is_quoted_in_part() -> None:
    error = refusal(json.dumps({"prompts": ["a"], "é" * 1_000_000: 1}).encode())
    assert (error.param or "").startswith("é" * 100)
    assert len(json.dumps(error.body())) < 20_000


# Records


def record_refusal(body: bytes | JSON) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_process(body, max_records=3)
    assert caught.value.status == 400
    return caught.value


def test_the_smallest_list_of_records() -> None:
    request = parse_process(b'{"records": [1]}', max_records=3)
    assert request == ProcessRequest(records=[1])
    assert (request.task_id, request.model, request.partial) == (None, None, False)
    assert request.scheduling() == DEFAULT_SCHEDULING


@given(st.lists(ANY_JSON, min_size=1, max_size=3))
def test_a_record_is_any_json_and_arrives_unchanged(records: list[Any]) -> None:
    text = json.dumps({"records": records})
    assume(not re.search(r"\\ud[89a-f]", text))  # A surrogate half, which is no JSON.
    assert json.dumps(parse_process(text.encode(), max_records=3).records) == json.dumps(records)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"records": []}, "records", "No records provided"),
        ({"records": [1] * 4}, "records", "records: 4 records in one call, at most 3 are allowed"),
        ({"records": "a"}, "records", "records: "),
        ({}, "records", "records: required, but missing"),
        ({"records": [1], "prompts": []}, "prompts", "prompts: unknown field; allowed are "),
        ({"records": [1], "tenant": "a\nb"}, "tenant", "tenant: must be 1 to 128 printable characters"),
        ({"records": [1], "max_tokens": 5}, "max_tokens", "max_tokens: unknown field"),
    ],
)
def test_a_wrong_list_of_records_is_refused(body: JSON, param: str, message: str) -> None:
    for error in (record_refusal(body), record_refusal(json.dumps(body).encode())):
        assert error.param == param
        assert error.message.startswith(message)


# Responses


def test_a_response_holds_details_and_errors_only_where_they_were_asked_for() -> None:
    response = GenerateResponse(results=["x"], task_id=None, usage=Usage())
    assert sorted(response.model_dump(exclude_unset=True)) == ["results", "task_id", "usage"]
    response.details = []
    response.errors = []
    assert sorted(response.model_dump(exclude_unset=True)) == [
        "details",
        "errors",
        "results",
        "task_id",
        "usage",
    ]


def test_defaults_of_a_config_are_the_sampling_fields_of_a_request() -> None:
    assert set(SamplingFields.model_fields) < set(GenerateRequest.model_fields)


@pytest.mark.parametrize("field", ["prompts", "messages"])
@pytest.mark.parametrize("is_text", [True, False])
def test_a_list_of_wrong_items_is_given_up_at_the_first(field: str, is_text: bool) -> None:
    content = {field: [1] * 300_000}
    start = time.process_time()
    error = refusal(json.dumps(content).encode() if is_text else content, max_prompts=10**6)
    assert error.param == f"{field}[0]"
    # Half a second with an error for each item.
    assert time.process_time() - start < 0.2
