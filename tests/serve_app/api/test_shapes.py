"""Lists of a request whose items are of several kinds, or of a kind that no route reads."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from serve_app.api.errors import RequestError
from serve_app.api.shapes import check_items

MILLION = 1_000_000


@pytest.mark.parametrize(
    ("name", "text", "at"),
    [
        ("prompt", b"[1.5" + b",1.5" * MILLION + b"]", "[0]"),
        ("prompt", b"[" + b"1," * MILLION + b'"a"]', f"[{MILLION}]"),
        ("prompt", b"[[" + b"1," * MILLION + b"1.5]]", f"[0][{MILLION}]"),
        ("prompt", b'["a",1]', "[1]"),
        ("prompt", b"[" * MILLION, "[0][0]"),
        ("tokens", b'[ "a", 1]', "[1]"),
        ("input", b"[{},1]", "[1]"),
        ("messages", b"[{}" + b",{}" * 10_000 + b"]", "[0]"),
        ("messages", b'[{"role":"user"},1]', "[1]"),
        ("messages", b'[[{"role":"user"},{}]]', "[0][1]"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_list_is_refused_at_its_first_wrong_item(name: str, text: bytes, at: str) -> None:
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        check_items(name, text)
    assert time.process_time() - began < 0.5
    assert (caught.value.status, caught.value.param) == (400, name)
    assert f"`${at}`" in caught.value.message


@given(
    st.sampled_from(["prompt", "input", "tokens"]),
    st.one_of(
        st.text(),
        st.integers(),
        st.none(),
        st.lists(st.text()),
        st.lists(st.integers()),
        st.lists(st.lists(st.integers())),
        st.lists(st.lists(st.text())),
        st.lists(st.dictionaries(st.text(), st.text())),
    ),
)
def test_a_value_of_one_kind_passes(name: str, value: object) -> None:
    if not (isinstance(value, list) and value and value[0] == []):
        check_items(name, to_json(value))


@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.text()}, optional={"content": st.none() | st.text() | st.lists(st.integers())}
        )
    )
)
def test_messages_and_lists_of_chats_pass(messages: list[dict[str, object]]) -> None:
    check_items("messages", to_json(messages))
    check_items("messages", to_json([messages, messages]))
