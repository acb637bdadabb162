"""Errors of the hub's client that `test_hub` and `test_adapters` don't get from the real one."""

import pytest
from huggingface_hub import errors

from serve_app.system.hub_errors import explain


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE is set"),
        (TimeoutError("late"), "the Hugging Face hub can't be reached (TimeoutError)"),
    ],
)
def test_a_hub_without_an_answer_is_away(error: Exception, message: str) -> None:
    failure = explain(error, "org/model", "config.json", kind="model", revision=None)
    assert failure == (message, True)


def test_a_refusal_is_final() -> None:
    error = errors.HFValidationError("bad")
    failure = explain(error, "org/--bad", "config.json", kind="model", revision=None)
    assert not failure.away
    assert "'org/--bad' is not a Hugging Face id" in failure.message
