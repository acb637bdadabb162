"""Values of a JSON text are counted without a parser, and never too few of them."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.errors import RequestError
from serve_app.ingress.value_count import NUMBERS, check_values

TEXT = st.text(st.sampled_from('ab,[{"\\\n:1é')) | st.text(max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=9)
        | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=12,
)


def weight(value: Any) -> int:
    """Return the values in a value, itself included; those of a list of numbers alone are left out."""
    if isinstance(value, dict):
        return 1 + sum(max(1, weight(item)) for item in value.values())
    if isinstance(value, list):
        numbers = all(isinstance(item, int | float) and not isinstance(item, bool) for item in value)
        return 1 + (0 if numbers else sum(map(weight, value)))
    return 1


def passes(body: bytes, most: int, **options: int) -> bool:
    try:
        check_values(body, most, **options)
    except RequestError:
        return False
    return True


@given(st.dictionaries(TEXT, VALUES, max_size=5), st.integers(1, 30), st.booleans())
def test_an_object_passes_if_it_has_no_more_values_than_the_bound(
    content: dict[str, Any], most: int, ascii: bool
) -> None:
    body = json.dumps(content, ensure_ascii=ascii).encode(errors="surrogatepass")
    count = weight(content)
    # A container and its first item are counted once or twice.
    if count > 2 * most + 2:
        assert not passes(body, most)
    if 2 * count < most:
        assert passes(body, most)


@pytest.mark.parametrize(
    "text", ["a, b, c, [d], {e}" * 50, '"' * 100, '\\"' * 99 + ",[{" * 99, "\\" * 51 + '",' * 99, '\n,"' * 99]
)
def test_what_is_in_a_text_is_no_value(text: str) -> None:
    assert passes(json.dumps({"prompt": text, "n": 1}).encode(), 4)


def test_prompts_in_tokens_may_be_long() -> None:
    body = json.dumps({"prompt": [list(range(40)), list(range(40))], "x": [1.5, -2e3]}).encode()
    assert passes(body, 9)
    with pytest.raises(RequestError, match=r"9 values.*90 numbers.*ingress\.max_values") as caught:
        check_values(json.dumps({"prompt": list(range(NUMBERS * 9 + 2))}).encode(), 9)
    assert caught.value.status == 400
    assert not passes(body, 9, numbers=1)
    # Not beside a text: then the list is one of prompts.
    assert not passes(json.dumps({"prompt": [*range(50), "a"]}).encode(), 9)


SIZE = 8 << 20


@pytest.mark.parametrize("unit", [b"{}", b"[]", b'""', b"[1]", b'{"a":[]}', b"null", b'"\\\\"'])
def test_a_body_of_millions_of_values_is_refused_in_a_fraction_of_a_second(unit: bytes) -> None:
    body = b'{"messages":[' + b",".join([unit] * (SIZE // (len(unit) + 1))) + b"]}"
    start = time.process_time()
    assert not passes(body, 100_000)
    assert time.process_time() - start < 0.5
