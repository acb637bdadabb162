"""Bounds on the tokens of a request."""

import pytest

from serve_app.api.token_bound import NOTHING, UNKNOWN_CONTEXT, TokenDemand


@pytest.mark.parametrize(
    ("demand", "most"),
    [
        (TokenDemand(100, output=50), 150),
        (TokenDemand(100), 1000),
        (TokenDemand(100, output=5000), 1000),
        (TokenDemand(5000, output=50), 1000),
        (TokenDemand(None, output=50), 1000),
        (TokenDemand(100, answers=3, output=50), 250),
        (TokenDemand(100, prompts=2, answers=3, output=50), 400),
        (TokenDemand(100, prompts=2, output=0), 100),
        (TokenDemand(None, prompts=2, output=0), 2000),
        (TokenDemand(100, output=-5), 100),
        (NOTHING, 0),
    ],
)
def test_a_prompt_and_its_answer_share_the_context(demand: TokenDemand, most: int) -> None:
    assert demand.most(1000) == most


def test_a_model_that_has_told_no_context_may_have_a_long_one() -> None:
    assert TokenDemand(100).most(None) == UNKNOWN_CONTEXT
