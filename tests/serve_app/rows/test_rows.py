"""The tokens of answers."""

from typing import Any

import pytest

from serve_app.rows.rows import RowTokens, together, tokens_of


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
        ({"prompt_tokens": -1, "completion_tokens": "2"}, RowTokens()),
        ({"prompt_tokens": True, "completion_tokens": 1e300}, RowTokens()),
        ([], RowTokens()),
    ],
)
def test_an_answer_reports_its_tokens(usage: Any, tokens: RowTokens) -> None:
    assert tokens_of({"usage": usage}) == tokens


@pytest.mark.parametrize("answer", [{}, [], None, "text"])
def test_an_answer_may_report_none(answer: Any) -> None:
    assert tokens_of(answer) == RowTokens()


def test_tokens_are_added_up() -> None:
    assert together([RowTokens(1, 2, 3, 4), RowTokens(10, 20, 30, 40)]) == RowTokens(11, 22, 33, 44)
    assert together([]) == RowTokens()
