"""Estimates of tokens."""

import pytest

from serve_app.api.protocol import GenerateRequest
from serve_app.api.token_estimate import EXPECTED_OUTPUT, estimate_call, estimate_tokens


def test_a_request_takes_up_its_prompt_and_its_answers() -> None:
    assert estimate_tokens(4_000, 1, 10) == 1_010
    assert estimate_tokens(4_000, 3, 10) == 1_030
    assert estimate_tokens(4_000, 1, None) == estimate_tokens(4_000, 1, 10**6) == 1_000 + EXPECTED_OUTPUT
    assert estimate_tokens(0, 1, -5) == 0


def test_a_call_over_the_handle_may_be_a_request_or_its_fields() -> None:
    fields = {"prompts": ["x" * 396] * 10, "max_tokens": 20}
    assert estimate_call(fields) == estimate_call(GenerateRequest(**fields)) == 10 * (100 + 20)  # type: ignore[arg-type]
    chats = {"messages": [[{"role": "user", "content": "x" * 400}]]}
    assert 100 < estimate_call(chats) - EXPECTED_OUTPUT < 120


@pytest.mark.parametrize("body", [None, 3, "text", [], {}, {"prompts": "x"}, {"prompts": [], "messages": 3}])
def test_a_call_that_makes_no_sense_is_estimated_all_the_same(body: object) -> None:
    assert estimate_call(body) == EXPECTED_OUTPUT


def test_a_limit_that_is_none_is_ignored() -> None:
    assert estimate_call({"prompts": [5], "max_tokens": "many"}) == estimate_call({"prompts": [5]})
