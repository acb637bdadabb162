"""Rows, results, and their tokens."""

from typing import Any

import pytest
from pydantic_core import from_json

from serve_app.jobs.rows import EXPIRED, NO_TOKENS, Row, RowTokens, answered, together, tokens_of, unrun
from tests.serve_app.jobs.helpers import row, text_of

ROW = Row(7, text_of(row("ü\n", body={"model": "demo", "service_tier": "priority"})))


def test_a_row_is_sent_as_flex_whatever_it_says() -> None:
    assert ROW.body() == {"model": "demo", "service_tier": "flex"}


def test_a_result_is_one_line() -> None:
    result = answered("batch_1", ROW, 200, {"text": "a\nb"})
    assert (result.line, result.is_error, result.is_unrun) == (7, False, False)
    assert result.text.count(b"\n") == 1
    assert from_json(result.text)["custom_id"] == "ü\n"
    assert from_json(result.text)["id"] == "batch_req_1_7"


def test_other_statuses_are_errors() -> None:
    assert answered("batch_1", ROW, 404, {}).is_error
    assert not answered("batch_1", ROW, 201, {}).is_error
    result = unrun("batch_1", ROW, EXPIRED)
    assert (result.is_error, result.is_unrun) == (True, True)
    assert from_json(result.text)["response"] is None


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}, RowTokens(5, 0, 2, 0)),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 1},
            },
            RowTokens(5, 4, 2, 1),
        ),
        (
            {
                "input_tokens": 5,
                "output_tokens": 2,
                "input_tokens_details": {"cached_tokens": 4},
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            RowTokens(5, 4, 2, 1),
        ),
        ({"prompt_tokens": 5, "total_tokens": 5}, RowTokens(5)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, RowTokens(5)),
        ({"prompt_tokens": -1, "completion_tokens": "2"}, NO_TOKENS),
        ({"prompt_tokens": True, "completion_tokens": 1e300}, NO_TOKENS),
        ([], NO_TOKENS),
    ],
)
def test_an_answer_reports_its_tokens(usage: Any, tokens: RowTokens) -> None:
    assert tokens_of({"usage": usage}) == tokens


@pytest.mark.parametrize("answer", [{}, [], None, "text"])
def test_an_answer_may_report_none(answer: Any) -> None:
    assert tokens_of(answer) == NO_TOKENS


def test_tokens_are_added_up() -> None:
    assert together([RowTokens(1, 2, 3, 4), RowTokens(10, 20, 30, 40)]) == RowTokens(11, 22, 33, 44)
    assert together([]) == NO_TOKENS
