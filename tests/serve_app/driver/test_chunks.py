"""Chunks of rows, and the items in them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.dataset.errors import CommandError, RowError
from serve_app.dataset.formats import Row, numbered
from serve_app.dataset.prompts import Prompter
from serve_app.driver.chunks import Item, chunked
from serve_app.driver.spans import Spans


def test_a_wrong_column_is_an_error_and_one_bad_row_is_not() -> None:
    rows = [{"question": "a"}, {"question": "b"}]
    with pytest.raises(CommandError, match=r"there are: question\. Name the one"):
        list(chunked(numbered(iter(rows)), Prompter(), 5))
    (chunk,) = chunked(numbered(iter([*rows, {"prompt": "c"}])), Prompter(), 5)
    assert [item.number for item in chunk] == [0, 1, 2]


@given(st.sets(st.integers(0, 30)), st.integers(1, 7), st.none() | st.integers(0, 40))
def test_chunks_are_contiguous_and_skip_finished_rows(done: set[int], size: int, limit: int | None) -> None:
    spans = Spans()
    for number in done:
        spans.add(number)
    rows = numbered({"prompt": str(number)} for number in range(31))
    chunks = list(chunked(rows, Prompter(), size, done=spans, limit=limit))
    numbers = [item.number for chunk in chunks for item in chunk]
    assert numbers == [n for n in range(min(31, 31 if limit is None else limit)) if n not in done]
    for chunk in chunks:
        assert 1 <= len(chunk) <= size
        assert [item.number for item in chunk] == list(range(chunk[0].number, chunk[0].number + len(chunk)))


@pytest.mark.parametrize(
    ("values", "id"),
    [
        ({"id": "x", "prompt": "a"}, "x"),
        ({"id": 7, "prompt": "a"}, 7),
        ({"id": None, "prompt": "a"}, 0),
        ({"id": [1], "prompt": "a"}, "[1]"),
        ({"id": 1.5, "prompt": "a"}, 1.5),
        ({"id": float("nan"), "prompt": "a"}, 0),
        ({"id": float("-inf"), "prompt": "a"}, 0),
        ({"prompt": "a"}, 0),
    ],
)
def test_the_id_of_a_row_is_its_column_or_its_number(values: dict[str, Any], id: object) -> None:
    ((item,),) = chunked(numbered([values]), Prompter(), 5)
    assert item == Item(0, id, "a")


def test_an_unreadable_row_keeps_its_error() -> None:
    error = RowError("invalid_row", "line 1: not valid JSON")
    ((item, other),) = chunked([Row(0, error), Row(1, {"prompt": "a"})], Prompter(), 5)
    assert item.prompt is error
    assert other.prompt == "a"


def test_output_rows_of_a_result_and_of_an_error_have_the_same_columns() -> None:
    item = Item(3, "x", "a")
    detail = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 2}
    done, failed = item.done("A", detail, 2), item.failed("invalid_row", "no", 0)
    assert list(done) == list(failed)
    assert (done["row"], done["id"], done["result"], done["error"]) == (3, "x", "A", None)
    assert (failed["result"], failed["error"]) == (None, {"type": "invalid_row", "message": "no"})
