"""Bodies of which the Ingress parses single fields, as a parser of all of it would."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from serve_app.api.errors import RequestError
from serve_app.ingress.body import JSONBody, form_fields

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, VALUES, max_size=5), st.booleans())
def test_fields_have_the_values_of_a_full_parse(content: dict[str, Any], ascii: bool) -> None:
    body = JSONBody(json.dumps(content, ensure_ascii=ascii).encode())
    assert body.values(*content, "not there") == content


@given(st.lists(TEXT | st.lists(st.integers(), max_size=3), max_size=6), st.integers(1, 8))
def test_a_length_is_exact_above_the_limit_and_never_too_small(prompts: list[Any], most: int) -> None:
    count = JSONBody(json.dumps({"prompt": prompts}).encode()).count("prompt", most)
    assert count is not None
    if len(prompts) > most:
        assert count == len(prompts)
    else:
        assert len(prompts) <= count <= most
    assert (count == 0) == (not prompts)


@pytest.mark.parametrize("value", ["x", 5, None, {"a": 1}, [1, 2, 3], [-1], [[1]][0]])
def test_other_values_are_no_list_of_prompts(value: object) -> None:
    assert JSONBody(json.dumps({"prompt": value}).encode()).count("prompt", 10) is None


@pytest.mark.parametrize("value", ["[NaN, 1]", '["\\ud83d\\ude00", "b"]', '["é"]', "[ ]", ' [\n"a" ]'])
def test_unusual_text_is_counted_as_well(value: str) -> None:
    count = JSONBody(f'{{"prompt": {value}, "x": NaN}}'.encode()).count("prompt", 10)
    assert count == (None if "NaN" in value else len(json.loads(value)))


def test_the_last_of_two_fields_with_one_name_counts() -> None:
    assert JSONBody(b'{"n": 1, "n": 1000}').values("n") == {"n": 1000}


def test_values_beyond_strict_json_are_read() -> None:
    assert JSONBody(b'{"top_p": NaN, "model": "a"}').values("model") == {"model": "a"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": 1} x',
        b"\xef\xbb\xbf{}",
        b"[" * 10_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        JSONBody(body)
    assert caught.value.status == 400
    assert caught.value.message.startswith("The body ")


@pytest.mark.parametrize(
    "value", [b"1" + b"0" * 4500, b"[" * 5000 + b"]" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000]
)
def test_a_value_beyond_what_python_reads_is_refused_with_its_field(value: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        JSONBody(b'{"model": "a", "n": ' + value + b"}").values("model", "n")
    assert caught.value.status == 400


def test_a_value_that_is_too_long_is_refused_and_not_quoted() -> None:
    for extra in (b"1", b"NaN"):
        with pytest.raises(RequestError) as caught:
            JSONBody(b'{"model": "' + b"a" * 5000 + b'", "x": ' + extra + b"}").values("model")
        assert caught.value.param == "model"
        assert len(caught.value.message) < 100


@pytest.mark.parametrize(
    ("messages", "count"),
    [
        ([{"content": "a, b"}] * 3, 3),
        ([{"content": ["a"] * 5}, {"content": [{"text": "a"}] * 2}], 9),
        ([[{"content": "a"}] * 2] * 3, 6),
        ({"content": [{"text": "a"}] * 4}, 5),
        ([[1, 2, 3], [4]], 0),
        ([1] * 9, 0),
        ("a" * 9, 0),
    ],
)
@pytest.mark.parametrize("other", ["1", "NaN"])
def test_messages_and_their_parts_are_counted_exactly_above_the_limit(
    messages: object, count: int, other: str
) -> None:
    body = JSONBody(f'{{"messages": {json.dumps(messages)}, "x": {other}}}'.encode())
    assert body.count_parts("messages", 0) == count


@pytest.mark.parametrize("other", ["1", "NaN"])
def test_messages_that_are_nested_too_deeply_are_refused(other: str) -> None:
    text = "[" * 9 + '{"content": "a"}' + "]" * 9
    with pytest.raises(RequestError) as caught:
        JSONBody(f'{{"messages": {text}, "x": {other}}}'.encode()).count_parts("messages", 0)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("other", ['"é"', "NaN", '"\\ud83d\\ude00"'])
def test_a_field_is_replaced_and_the_others_stay(other: str) -> None:
    body = f'{{"service_tier": "fast", "n": [1, {{"a": 2}}], "x": {other}}}'
    found = json.loads(JSONBody(body.encode()).replaced("service_tier", "priority"))
    # NaN is equal to nothing.
    assert repr(found) == repr(json.loads(body) | {"service_tier": "priority"})


def form(*parts: bytes) -> bytes:
    return b"".join(b"--cut\r\n" + part + b"\r\n" for part in parts) + b"--cut--\r\n"


FILE = (
    b'Content-Disposition: form-data; name="file"; filename="model"\r\n\r\n' + b"\xff\r\nname=model\r\n\r\nx"
)
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-\xc3\xa9'
PLAIN = b"content-disposition: form-data; name=model\r\ncontent-type: text/plain\r\n\r\nwhisper-\xc3\xa9"


def model_of(body: bytes, type: str) -> str | None:
    return form_fields(body, type, {"model"}).get("model")


@pytest.mark.parametrize("parts", [(FILE, MODEL), (MODEL, FILE), (PLAIN,), (FILE, PLAIN, MODEL)])
@pytest.mark.parametrize("type", ["multipart/form-data; boundary=cut", 'Multipart/Form-Data; Boundary="cut"'])
def test_a_field_of_a_form_is_found_beside_its_files(parts: tuple[bytes, ...], type: str) -> None:
    assert model_of(form(*parts), type) == "whisper-é"


@pytest.mark.parametrize(
    ("body", "type"),
    [
        (form(FILE), "multipart/form-data; boundary=cut"),
        (form(MODEL), "multipart/form-data; boundary=other"),
        (form(MODEL), "multipart/form-data"),
        (form(MODEL), "text/plain; boundary=cut"),
        (form(MODEL), ""),
        (b"", "multipart/form-data; boundary=cut"),
        (form(MODEL.replace(b"model", b"models")), "multipart/form-data; boundary=cut"),
    ],
)
def test_other_bodies_have_no_such_field(body: bytes, type: str) -> None:
    assert model_of(body, type) is None


OTHER = b'Content-Disposition: form-data; name="model"\r\n\r\nother'
FAKE = b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\nx'


async def taken(body: bytes, type: str) -> str | None:
    """Return the field `model` of a form as vLLM's application takes it."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", type.encode())]
    async with Request({"type": "http", "method": "POST", "headers": headers}, receive).form() as fields:
        value = fields.get("model")
    return value if isinstance(value, str) else None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (form(MODEL, OTHER), "other"),
        (form(OTHER, FILE, MODEL), "whisper-é"),
        (form(MODEL, OTHER.replace(b"name=", b"name = ")), "other"),
        (form(MODEL, OTHER.replace(b"name=", b"x=1;NAME=")), "other"),
        (
            form(MODEL, OTHER.replace(b"Content", b"content-disposition: form-data; name=x\r\nContent")),
            "other",
        ),
        (
            form(MODEL, OTHER.replace(b"\r\n\r\n", b"\r\ncontent-disposition: form-data; name=x\r\n\r\n")),
            None,
        ),
        (form(MODEL, OTHER.replace(b'"model"', b'model; name="x"')), None),
        (form(MODEL, OTHER.replace(b'"model"', b"x; name*=utf-8''model")), None),
        (form(MODEL, OTHER.replace(b'"model"', b"Model")), None),
        # In the content of a file: no line begins with the boundary, or it goes on.
        (form(MODEL, FAKE + b"--cut\r\n" + OTHER), None),
        (form(MODEL, FAKE + b"\r\n--cutter\r\n" + OTHER), None),
        (form(MODEL, FAKE[:-1] + b"--cut\r\n" + OTHER), None),
        (form(MODEL, OTHER).replace(b"\r\n--cut\r", b"\r\n--cut \t\r"), "other"),
        # Behind the end of the form.
        (form(MODEL) + form(OTHER), None),
        (b"\r\n" + form(MODEL), None),
        (b"\n" + form(MODEL), None),
    ],
)
async def test_the_field_of_a_form_is_the_one_that_vllm_takes(body: bytes, expected: str | None) -> None:
    type = "multipart/form-data; boundary=cut"
    assert await taken(body, type) == (expected or "whisper-é")
    assert model_of(body, type) == (expected or "whisper-é")


@pytest.mark.parametrize(
    "parameter", ["boundary*=x; boundary*0=y", "x*=1; x*0=2", f"x*{'1' * 5000}=2", "boundary*=utf-8''other"]
)
async def test_parameters_of_a_type_that_vllm_leaves_out_are_left_out_here(parameter: str) -> None:
    type = f"multipart/form-data; {parameter}; boundary=cut"
    assert await taken(form(MODEL), type) == "whisper-é"
    assert model_of(form(MODEL), type) == "whisper-é"


@pytest.mark.parametrize("end", [b"\r\nx: " + b"x" * 5000, b"; " * 33])
def test_a_part_of_a_form_with_an_endless_head_is_refused(end: bytes) -> None:
    part = MODEL.replace(b"\r\n\r\n", end + b"\r\n\r\n")
    with pytest.raises(RequestError) as caught:
        model_of(form(part), "multipart/form-data; boundary=cut")
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")


def test_a_boundary_may_be_as_long_as_the_standard_allows() -> None:
    for size in (70, 71):
        type = f"multipart/form-data; boundary={'x' * size}"
        body = form(MODEL).replace(b"cut", b"x" * size)
        if size == 70:
            assert model_of(body, type) == "whisper-é"
        else:
            with pytest.raises(RequestError) as caught:
                model_of(body, type)
            assert (caught.value.status, caught.value.param) == (400, "content-type")


def test_a_long_name_of_a_file_is_no_endless_head() -> None:
    file = FILE.replace(b'"model"', b'"%s"' % (b"; model" * 30))
    assert model_of(form(file, MODEL), "multipart/form-data; boundary=cut") == "whisper-é"


HEAD = b"content-disposition:"


@pytest.mark.parametrize(
    "body",
    [
        (b"--cut\r\n" + HEAD * 200 + b"\r\n\r\n") * 2000,
        (b"--cut\r\n" + HEAD + b"; " * 2000 + b"\r\n\r\n") * 2000,
        b"--cut\r\n\r\n\r\n" * 700_000,
    ],
)
def test_a_hostile_form_takes_a_fraction_of_a_second(body: bytes) -> None:
    start = time.process_time()
    assert model_of(body, "multipart/form-data; boundary=cut") is None
    assert time.process_time() - start < 1.0


@given(st.binary(max_size=60), st.text(max_size=40))
def test_no_body_and_no_type_break_the_search(body: bytes, type: str) -> None:
    model_of(form(body), "multipart/form-data; boundary=cut" + type)
    model_of(body, type)


def test_the_text_of_fields_is_that_of_the_body_in_the_order_asked_for() -> None:
    body = JSONBody(b'{"messages": [ {"role": "user"} ], "model": "a", "system":"Be brief."}')
    assert body.text(("system", "tools", "messages"), 1_000) == b'"Be brief."[ {"role": "user"} ]'
    assert body.text(("system", "messages"), 13) == b'"Be brief."[ '
    assert body.text(("prompt",), 1_000) == b""


@pytest.mark.parametrize("body", [b'{"prompt": "a\\ud83d\\ude00", "n": 1}', b'{"prompt": "ab", "x": NaN}'])
def test_a_body_that_is_parsed_as_a_whole_has_the_text_of_its_fields_too(body: bytes) -> None:
    text = JSONBody(body).text(("prompt",), 1_000)
    assert json.loads(text) == json.loads(body)["prompt"]
