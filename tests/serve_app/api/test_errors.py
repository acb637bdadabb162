"""Errors: their shape, their headers, and that they survive a handle."""

import pickle

import pytest

from serve_app.api.errors import RequestError


def test_an_error_has_the_shape_of_openai() -> None:
    error = RequestError(404, "not_found_error", "no such model", param="model")
    assert error.body() == {
        "error": {"message": "no such model", "type": "not_found_error", "param": "model", "code": 404}
    }
    assert str(error) == "no such model"
    assert error.headers() == {}


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (59.5, "60")]
)
def test_retry_after_is_whole_seconds_and_never_too_early(seconds: float, header: str) -> None:
    error = RequestError(429, "rate_limit_error", "full", retry_after_s=seconds)
    assert error.headers() == {"retry-after": header}


def test_an_error_crosses_a_handle_whole() -> None:
    error = RequestError(429, "rate_limit_error", "full", param="prompts[3]", retry_after_s=1.5, final=True)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is RequestError
    assert vars(copy) == vars(error)
    assert str(copy) == "full"


def test_an_error_of_a_part_names_the_part_and_keeps_the_rest() -> None:
    error = RequestError(429, "rate_limit_error", "full", retry_after_s=1.5).at("prompts[3]")
    assert vars(error) == {
        "status": 429,
        "type": "rate_limit_error",
        "message": "prompts[3]: full",
        "param": "prompts[3]",
        "retry_after_s": 1.5,
        "final": False,
        "code": None,
    }
